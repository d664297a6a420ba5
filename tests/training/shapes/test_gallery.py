"""Galleries keep scenes as numbers, and images as the model sees them."""

from random import Random

import numpy as np
import pytest

from training.shapes.gallery import (
    decode,
    encode,
    mirror_codes,
    render_crowd,
    render_group,
    to_input,
)
from training.shapes.render import SHADES, render
from training.shapes.world import make_scene, sample_scene


@pytest.mark.parametrize("seed", range(30))
def test_a_scene_survives_encoding(seed):
    scene = sample_scene(Random(seed))
    assert decode(encode(scene)) == scene


def test_a_mirror_exchanges_left_and_right():
    scene = make_scene("white", ("red", "star", "top left"), ("blue", "ring", "center"))
    mirrored = make_scene("white", ("red", "star", "top right"), ("blue", "ring", "center"))
    assert decode(mirror_codes(encode(scene))) == mirrored
    assert decode(mirror_codes(np.stack([encode(scene)]))[0]) == mirrored


def test_images_are_squashed_to_a_square():
    image = render(make_scene("white", ("red", "circle", "center")), Random(0)).resize((300, 200))
    array = to_input(image, 96)
    assert array.shape == (96, 96, 3)
    assert tuple(array[48, 48].tolist()) in SHADES["red"]


def test_a_group_holds_the_same_scene_twice_and_two_neighbours():
    first, second, third, fourth = (scene for scene, _ in render_group(Random(3)))
    assert first == second
    assert first not in (third, fourth)


def test_a_crowd_has_more_shapes_than_the_world():
    assert all(len(scene.shapes) >= 5 for scene, _ in render_crowd(Random(0)))
