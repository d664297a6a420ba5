"""Batches of packed conversations about the images of a gallery."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
from torch import Tensor

from training.shapes.architecture import NUM_IMAGE_TOKENS
from training.shapes.gallery import (
    GROUP_SIZE,
    NUM_HELD_OUT,
    Gallery,
    decode,
    mirror_codes,
)
from training.shapes.sequences import (
    Encoder,
    Sequence,
    pack_branches,
    pack_conversation,
    pack_look_ups,
    pack_pairs,
)
from training.shapes.tokenizer import IMAGE_ID
from training.shapes.world import Scene

LENGTH = 320  # tokens of every sequence; one length, so that there is one shape to compile for


@dataclass(frozen=True, slots=True)
class Recipe:
    """One sort of sequence: how many images it is about, how often it comes, what it is like."""

    pack: Callable[[tuple[Scene, ...], Encoder, int, Random], Sequence]
    num_images: int
    share: float
    alike: float = 0.0  # share of pairs that come from one group and so are hard to tell apart


RECIPES = (
    Recipe(pack_branches, num_images=1, share=0.25),
    Recipe(pack_branches, num_images=2, share=0.40, alike=0.5),
    Recipe(pack_pairs, num_images=6, share=0.23, alike=0.9),
    Recipe(pack_conversation, num_images=2, share=0.09, alike=0.5),
    Recipe(pack_conversation, num_images=4, share=0.03),
)
EASY = Recipe(pack_look_ups, num_images=1, share=1.0)
NUM_EASY_STEPS = 200  # at the beginning
# Pairs of one group: the very same image, the same scene drawn otherwise, scenes alike
ALIKE = ((0, 0), (1, 1), (0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (1, 3), (3, 1), (2, 3))


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences of T tokens; see `sequences.Sequence`.

    Shapes: `images` uint8 (N, size, size, 3), in the order of the sequences; the tensors below (B, T).
    `answers` are (topic, start, end) of each answer of each sequence.
    """

    images: Tensor
    token_ids: Tensor
    positions: Tensor
    branches: Tensor
    weights: Tensor
    answers: tuple[tuple[tuple[str, int, int], ...], ...]


class BatchMaker:
    """Makes the batch of any step, always the same for the same step."""

    def __init__(self, gallery: Gallery, encoder: Encoder, batch_size: int) -> None:
        self.gallery = gallery
        self.encoder = encoder
        self.batch_size = batch_size

    def make(self, step: int) -> Batch:
        """The batch of a step; negative steps are held out, in images as in questions."""
        rng = Random(step if step >= 0 else f"held out {step}")
        shares = [recipe.share for recipe in RECIPES]
        recipes = rng.choices(RECIPES, shares, k=self.batch_size)
        if 0 <= step < NUM_EASY_STEPS:
            recipes = self.batch_size * [EASY]
        samples = [self._sample(recipe, rng, held_out=step < 0) for recipe in recipes]
        sequences = [sequence for _, sequence in samples]
        stacked = {
            name: torch.from_numpy(np.stack([getattr(sequence, name) for sequence in sequences]))
            for name in ("token_ids", "positions", "branches", "weights")
        }
        images = torch.from_numpy(np.concatenate([images for images, _ in samples]))
        return Batch(images, answers=tuple(sequence.answers for sequence in sequences), **stacked)

    def _sample(self, recipe: Recipe, rng: Random, held_out: bool) -> tuple[np.ndarray, Sequence]:
        """Images and the sequence about them; only as many images as the sequence shows."""
        indices = self._pick(recipe, rng, held_out)
        images, codes = self.gallery.images[indices], self.gallery.codes[indices]
        if rng.random() < 0.5:
            images, codes = images[:, :, ::-1].copy(), mirror_codes(codes)
        scenes = tuple(decode(code) for code in codes)
        sequence = recipe.pack(scenes, self.encoder, LENGTH, rng)
        num_shown = int((sequence.token_ids == IMAGE_ID).sum()) // NUM_IMAGE_TOKENS
        return images[:num_shown], sequence

    def _pick(self, recipe: Recipe, rng: Random, held_out: bool) -> list[int]:
        """Any images, but some pairs from one group."""
        first_held_out = self.gallery.num_groups - NUM_HELD_OUT // GROUP_SIZE
        groups = (
            range(first_held_out, self.gallery.num_groups) if held_out else range(first_held_out)
        )
        indices: list[int] = []
        while len(indices) < recipe.num_images:
            if rng.random() < recipe.alike:
                start = GROUP_SIZE * rng.choice(groups)
                indices += [start + offset for offset in rng.choice(ALIKE)]
            else:
                indices += [self._any(groups, rng) for _ in "ab"]
        return indices[: recipe.num_images]

    def _any(self, groups: range, rng: Random) -> int:
        return GROUP_SIZE * rng.choice(groups) + rng.randrange(GROUP_SIZE)
