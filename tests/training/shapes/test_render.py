"""Rendered images match their scenes in every style."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from PIL import Image

from training.shapes.render import DIAMETERS, render, sample_style
from training.shapes.world import PLACES, Scene, Shape, sample_scene


def foreground(image: Image.Image, scene: Scene) -> np.ndarray:
    """Returns where the image differs from its background. Shapes: bool (H, W)."""
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


@pytest.mark.parametrize("size", DIAMETERS)
def test_sizes_match_their_words(size):
    for seed in range(20):
        image = render(Scene("white", (Shape("circle", "red", size, "center"),)), Random(seed))
        width = foreground(image, Scene("white", ())).any(0).sum() / image.width
        low, high = DIAMETERS[size]
        assert low - 0.01 <= width <= high + 0.01
