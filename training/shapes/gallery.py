"""Rendered images with their scenes, kept in files, since drawing costs more than learning from them.

A gallery is a sequence of groups of four: one scene drawn in two styles, then two scenes that differ from
it in one word, in the same two styles. So it also holds pairs that are hard to tell apart.
"""

from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image
from rich.progress import track

from training.shapes.render import render, sample_style
from training.shapes.world import (
    BACKGROUNDS,
    COLORS,
    KINDS,
    PLACES,
    SIZES,
    Scene,
    Shape,
    sample_scene,
    sample_variation,
)

GROUP_SIZE = 4
GROUPS_PER_SHARD = 512
ALIKE = 0.16  # share of scenes whose shapes have one kind or one color
NUM_HELD_OUT = 1024  # images at the end of a gallery, which training never sees
CODE_LENGTH = 1 + 3 * len(PLACES)

_MIRRORED_CELLS = [3 * row + column for row in range(3) for column in (2, 1, 0)]


@dataclass(frozen=True, slots=True)
class Gallery:
    """Shapes: `images` uint8 (N, size, size, 3); `codes` uint8 (N, CODE_LENGTH), see `encode`."""

    images: np.ndarray
    codes: np.ndarray


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


def decode(code: np.ndarray) -> Scene:
    """The scene that `encode` made numbers of."""
    cells = code[1:].reshape(len(PLACES), 3).tolist()
    return Scene(
        BACKGROUNDS[code[0]],
        tuple(
            Shape(KINDS[kind - 1], COLORS[color - 1], SIZES[size - 1], place)
            for place, (kind, color, size) in zip(PLACES, cells, strict=True)
            if kind
        ),
    )


def mirror_codes(codes: np.ndarray) -> np.ndarray:
    """The codes of the same images seen in a mirror (left and right exchanged)."""
    cells = codes[..., 1:].reshape(*codes.shape[:-1], len(PLACES), 3)[..., _MIRRORED_CELLS, :]
    return np.concatenate([codes[..., :1], cells.reshape(*codes.shape[:-1], -1)], axis=-1)


def to_input(image: Image.Image, size: int) -> np.ndarray:
    """An image as the model sees it: RGB, squashed to a square. Shapes: uint8 (size, size, 3)."""
    return np.asarray(image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC))


def render_group(rng: Random) -> list[tuple[Scene, Image.Image]]:
    """One group of a gallery, at full resolution."""
    scene = sample_scene(rng, alike=ALIKE)
    scenes = (scene, scene, sample_variation(scene, rng), sample_variation(scene, rng))
    styles = 2 * (sample_style(rng), sample_style(rng))
    return [(each, render(each, rng, style)) for each, style in zip(scenes, styles, strict=True)]


def write_shard(folder: Path, index: int, size: int) -> None:
    """Render the shard of this index; the same index always gives the same images."""
    rng = Random(index)
    drawn = [pair for _ in range(GROUPS_PER_SHARD) for pair in render_group(rng)]
    codes = np.stack([encode(scene) for scene, _ in drawn])
    images = np.stack([to_input(image, size) for _, image in drawn])
    for name, array in (("codes", codes), ("pictures", images)):  # names of files that are kept
        with (folder / f"{index:04d}.{name}.part").open("wb") as file:
            np.save(file, array, allow_pickle=False)
        (folder / f"{index:04d}.{name}.part").rename(folder / f"{index:04d}.{name}.npy")


def load_gallery(folder: Path, num_shards: int, size: int, num_processes: int = 2) -> Gallery:
    """The first `num_shards` shards, rendered where they are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [i for i in range(num_shards) if not (folder / f"{i:04d}.pictures.npy").exists()]
    if missing:
        with Pool(num_processes) as pool:
            jobs = [pool.apply_async(write_shard, (folder, index, size)) for index in missing]
            for job in track(jobs, description="rendering"):
                job.get()

    def read(name: str) -> np.ndarray:
        shards = (
            np.load(folder / f"{i:04d}.{name}.npy", allow_pickle=False) for i in range(num_shards)
        )
        return np.concatenate(list(shards))

    return Gallery(read("pictures"), read("codes"))
