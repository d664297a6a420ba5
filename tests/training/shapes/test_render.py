"""Images show what their scene says, whatever program draws them; a scene survives as numbers."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from PIL import Image

from training.shapes.gallery import (
    decode,
    encode,
    mirror_codes,
    render_group,
)
from training.shapes.render import DIAMETERS, SHADES, Style, render, sample_style
from training.shapes.world import (
    COLORS,
    PLACES,
    Scene,
    make_scene,
    sample_scene,
)


def nearest_color(pixel, words) -> str:
    """The word whose nearest shade is nearest."""
    return min(
        words,
        key=lambda word: min(
            np.abs(np.subtract(shade, pixel, dtype=int)).sum() for shade in SHADES[word]
        ),
    )


def foreground(image: Image.Image, scene: Scene) -> np.ndarray:
    """Where the image differs from its background. Shapes: bool (H, W)."""
    levels = np.asarray(image, dtype=int)
    background = np.median(levels.reshape(-1, 3), axis=0)
    return np.abs(levels - background).max(-1) > 40


@pytest.mark.parametrize("seed", range(40))
def test_in_any_style_shapes_stay_in_their_places(seed):
    rng = Random(seed)
    scene = sample_scene(rng, num_shapes=3)
    style = replace(sample_style(rng), frame=0.0, background_gradient=0.0, shadow=0.0)
    image = render(scene, rng, style)
    assert image.size == (style.width, style.height)
    mask = np.asarray(
        Image.fromarray(foreground(image, scene)).resize((90, 90), Image.Resampling.NEAREST)
    )
    for index, place in enumerate(PLACES):
        row, column = divmod(index, 3)
        covered = mask[30 * row + 3 : 30 * row + 27, 30 * column + 3 : 30 * column + 27].mean()
        if scene.at(place) is None:
            assert covered < 0.12, place
        else:
            assert covered > 0.015, place


@pytest.mark.parametrize("supersampling", [1, 3])
def test_frames_and_gradients_leave_shapes_where_they_are(supersampling):
    scene = make_scene("white", ("blue", "square", "top right"), ("red", "circle", "bottom left"))
    style = Style(
        width=300, height=150, supersampling=supersampling, shade=0, frame=0.04, mat=0.02,
        frame_color=(139, 69, 19), background_gradient=0.2, shape_gradient=0.2, shadow=0.4,
    )  # fmt: skip
    image = render(scene, Random(0), style)
    assert image.size == (300, 150)
    assert image.getpixel((1, 1)) == style.frame_color
    assert nearest_color(image.getpixel((250, 30)), COLORS) == "blue"
    assert nearest_color(image.getpixel((50, 120)), COLORS) == "red"
    assert nearest_color(image.getpixel((150, 75)), SHADES) in ("white", "gray")


@pytest.mark.parametrize("size", DIAMETERS)
def test_sizes_are_what_the_words_say(size):
    for seed in range(20):
        image = render(make_scene("white", ("red", "circle", "center", size)), Random(seed))
        width = foreground(image, make_scene("white")).any(0).sum() / image.width
        low, high = DIAMETERS[size]
        assert low - 0.01 <= width <= high + 0.01


@pytest.mark.parametrize("seed", range(30))
def test_a_scene_survives_encoding(seed):
    scene = sample_scene(Random(seed))
    assert decode(encode(scene)) == scene


def test_a_mirror_exchanges_left_and_right():
    scene = make_scene("white", ("red", "star", "top left"), ("blue", "ring", "center"))
    mirrored = make_scene("white", ("red", "star", "top right"), ("blue", "ring", "center"))
    assert decode(mirror_codes(encode(scene))) == mirrored
    assert decode(mirror_codes(np.stack([encode(scene)]))[0]) == mirrored


def test_a_group_holds_the_same_scene_twice_and_two_neighbours():
    first, second, third, fourth = (scene for scene, _ in render_group(Random(3)))
    assert first == second
    assert first not in (third, fourth)
