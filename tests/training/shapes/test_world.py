"""Scenes keep to the rules of the image world."""

from random import Random

import pytest

from training.shapes.world import (
    MAX_SHAPES,
    PLACES,
    Scene,
    Selector,
    Shape,
    make_scene,
    sample_scene,
    sample_variation,
)


def differences(one: Scene, other: Scene) -> int:
    """In how many places, or in the background, two scenes differ."""
    return sum(one.at(place) != other.at(place) for place in PLACES) + (
        one.background != other.background
    )


def test_sampled_scenes_are_varied_and_lawful():
    scenes = [sample_scene(Random(seed)) for seed in range(300)]  # an unlawful one raises
    assert {len(scene.shapes) for scene in scenes} == set(range(MAX_SHAPES + 1))
    assert len(set(scenes)) > 250


def test_a_variation_differs_in_one_thing():
    for seed in range(300):
        rng = Random(seed)
        scene = sample_scene(rng)
        varied = sample_variation(scene, rng)
        assert varied != scene
        assert differences(scene, varied) <= 2  # a shape that moved leaves one place for another


def test_a_shape_of_the_background_color_is_refused():
    with pytest.raises(ValueError, match="background"):
        make_scene("red", ("red", "star", "center"))


def test_two_shapes_at_one_place_are_refused():
    with pytest.raises(ValueError, match="place"):
        make_scene("white", ("red", "star", "center"), ("blue", "ring", "center"))


@pytest.mark.parametrize(
    ("selector", "noun", "nouns"),
    [
        (Selector(), "shape", "shapes"),
        (Selector(color="red"), "red shape", "red shapes"),
        (Selector("cross"), "cross", "crosses"),
        (Selector("star", "red"), "red star", "red stars"),
    ],
)
def test_a_selector_has_words(selector, noun, nouns):
    assert (selector.noun, selector.nouns) == (noun, nouns)


def test_a_selector_picks_what_matches():
    star, ring = Shape("star", "red", "large", "top left"), Shape("ring", "red", "small", "center")
    scene = Scene("white", (star, ring))
    assert Selector(kind="star").pick(scene) == (star,)
    assert Selector(color="red").pick(scene) == (star, ring)
    assert Selector("ring", "blue").pick(scene) == ()
