"""Scenes as numbers, and groups of rendered images with their scenes.

A group is one scene drawn in two styles, then two scenes that differ from it in one word, in the same two
styles. It therefore contains pairs that are hard to distinguish.
"""

from random import Random

import numpy as np
from PIL import Image

from training.shapes.architecture import IMAGE_SIZE
from training.shapes.render import render, sample_style
from training.shapes.world import (
    BACKGROUNDS,
    COLORS,
    KINDS,
    PLACES,
    SIZES,
    Scene,
    sample_scene,
    sample_variation,
)

ALIKE = 0.16  # share of scenes whose shapes have one kind or one color
CODE_LENGTH = 1 + 3 * len(PLACES)


def encode(scene: Scene) -> np.ndarray:
    """A scene as numbers: background, then (kind, color, size) of each place; 0 is "no shape here"."""
    cells = np.zeros((len(PLACES), 3), dtype=np.uint8)
    for shape in scene.shapes:
        cells[PLACES.index(shape.place)] = (
            1 + KINDS.index(shape.kind),
            1 + COLORS.index(shape.color),
            1 + SIZES.index(shape.size),
        )
    return np.concatenate([[np.uint8(BACKGROUNDS.index(scene.background))], cells.ravel()])


def to_input(image: Image.Image) -> np.ndarray:
    """An image in the models' input format: RGB, resized to a square. Shapes: uint8 (size, size, 3)."""
    size = (IMAGE_SIZE, IMAGE_SIZE)
    return np.asarray(image.convert("RGB").resize(size, Image.Resampling.BICUBIC))


def render_group(rng: Random) -> list[tuple[Scene, Image.Image]]:
    scene = sample_scene(rng, alike=ALIKE)
    scenes = (scene, scene, sample_variation(scene, rng), sample_variation(scene, rng))
    styles = 2 * (sample_style(rng), sample_style(rng))
    return [(each, render(each, rng, style)) for each, style in zip(scenes, styles, strict=True)]
