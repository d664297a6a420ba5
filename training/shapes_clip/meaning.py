"""What scenes and queries mean, as vectors of one space, without images or words; used in training only.

A scene is what is there: a star, something red, a red star, a small one, one at the top left. A query is what
of this it asks for. Two tables turn both into vectors that are near where the one is true of the other. They
are learned from scenes alone in seconds; then images and texts each learn to be what they mean.
"""

import math
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.shapes.gallery import decode, encode
from training.shapes.trainer import Trainer
from training.shapes.world import (
    BACKGROUNDS,
    COLORS,
    KINDS,
    PLACES,
    SIZES,
    sample_scene,
)
from training.shapes_clip.queries import Fact, Query, sample_query

RANK = 120  # of all vectors: texts of 128 numbers cannot mean more
NOISE = 0.03  # of each number of an image's vector, that queries learn to bear
HARDEST = ("with place", "two shapes", "shape and background")  # asked more often than others
_WORDS = {"kind": KINDS, "color": COLORS, "size": SIZES, "place": PLACES}
#: What a shape says of a scene, in the order of the features.
_COMBINATIONS = (
    ("kind",),
    ("color",),
    ("kind", "color"),
    ("kind", "size"),
    ("color", "size"),
    ("kind", "color", "size"),
    ("kind", "place"),
    ("color", "place"),
)
_STARTS = np.cumsum(
    [0] + [math.prod(len(_WORDS[name]) for name in names) for names in _COMBINATIONS]
).tolist()
_BACKGROUND = _STARTS[-1]
_COUNT = _BACKGROUND + len(BACKGROUNDS)
NUM_FEATURES = _COUNT + 1 + len(PLACES)


def features_of_scenes(codes: np.ndarray) -> np.ndarray:
    """1 for what is there. Shapes: uint8 (N, CODE_LENGTH) in, float32 (N, NUM_FEATURES) out."""
    features = np.zeros((len(codes), NUM_FEATURES), dtype=np.float32)
    cells = codes[:, 1:].reshape(len(codes), len(PLACES), 3).astype(int)
    rows, place = np.nonzero(cells[..., 0])
    found = {"place": place} | {
        name: cells[rows, place, index] - 1 for index, name in enumerate(("kind", "color", "size"))
    }
    for start, names in zip(_STARTS, _COMBINATIONS, strict=False):
        index = np.zeros_like(place)
        for name in names:
            index = index * len(_WORDS[name]) + found[name]
        features[rows, start + index] = 1
    every = np.arange(len(codes))
    features[every, _BACKGROUND + codes[:, 0]] = 1
    features[every, _COUNT + (cells[..., 0] > 0).sum(1)] = 1
    return features


def features_of_queries(queries: Sequence[Query]) -> np.ndarray:
    """How much each feature is asked for; each fact as much as another. Shapes: float32 (Q, NUM_FEATURES)."""
    features = np.zeros((len(queries), NUM_FEATURES), dtype=np.float32)
    for row, query in zip(features, queries, strict=True):
        for fact in query.facts:
            asked = list(_asked(fact))
            row[asked] += 1 / len(asked)
        if query.background is not None:
            row[_BACKGROUND + BACKGROUNDS.index(query.background)] = 1
        if query.is_complete:
            row[_COUNT + len(query.facts)] = 0.5
    return features


def _asked(fact: Fact) -> Iterator[int]:
    """The features that say most of what a fact says."""
    words = {name: word for name in _WORDS if (word := getattr(fact, name)) is not None}
    wanted = {tuple(words)}
    if "place" in words:
        wanted = {(name, "place") for name in ("kind", "color") if name in words}
        wanted |= {("kind", "color")} if len(wanted) == 2 else set()
    for start, names in zip(_STARTS, _COMBINATIONS, strict=False):
        if names in wanted:
            index = 0
            for name in names:
                index = index * len(_WORDS[name]) + _WORDS[name].index(words[name])
            yield start + index


class Meaning(nn.Module):
    """The two tables. Vectors have length 1."""

    axes: Tensor

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(NUM_FEATURES, RANK, generator=generator) / RANK**0.5
        self.scenes, self.queries = nn.Parameter(table.clone()), nn.Parameter(table.clone())
        self.log_scale = nn.Parameter(torch.tensor(2.9))
        square = torch.linalg.qr(torch.randn(dimensions, dimensions, generator=generator)).Q
        self.register_buffer("axes", square[:RANK].contiguous())

    def of_scenes(self, codes: np.ndarray) -> Tensor:
        """Shapes: uint8 (N, CODE_LENGTH) in, (N, dimensions) out."""
        return self._vectors(features_of_scenes(codes), self.scenes)

    def of_queries(self, queries: Sequence[Query]) -> Tensor:
        """Shapes: (Q, dimensions)."""
        return self._vectors(features_of_queries(queries), self.queries)

    def _vectors(self, features: np.ndarray, table: Tensor) -> Tensor:
        return F.normalize(torch.from_numpy(features) @ table, dim=1) @ self.axes

    def loss(self, codes: np.ndarray, queries: Sequence[Query], noise: Tensor) -> Tensor:
        """Each true pair stands against all false ones of its query, and of its scene."""
        is_true = torch.from_numpy(np.stack([query.holds_of(codes) for query in queries]))
        scale = self.log_scale.exp().clamp(max=60)
        logits = scale * self.of_queries(queries) @ (self.of_scenes(codes) + noise).T
        return 0.8 * _rank_loss(logits, is_true) + 0.2 * _rank_loss(logits.T, is_true.T)


def _rank_loss(logits: Tensor, is_true: Tensor) -> Tensor:
    """Shapes: (rows, columns) both."""
    false = logits.masked_fill(is_true, -1e4).logsumexp(1, keepdim=True)
    losses = F.softplus(false - logits) * is_true
    rows = is_true.any(1)
    return (losses.sum(1)[rows] / is_true.sum(1)[rows]).mean()


def learn_meaning(dimensions: int, num_steps: int = 500, batch_size: int = 384) -> Meaning:
    """The tables, frozen; always the same."""
    meaning = Meaning(dimensions)
    generator = torch.Generator().manual_seed(0)
    rng = Random(0)
    known = np.stack([encode(sample_scene(rng)) for _ in range(20 * batch_size)])

    def losses_of() -> tuple[Tensor]:
        codes = known[rng.choices(range(len(known)), k=batch_size)]
        queries = [
            sample_query(decode(code), rng, rng.choice(HARDEST) if rng.random() < 0.4 else None)
            for code in codes
        ]
        noise = NOISE * torch.randn(batch_size, dimensions, generator=generator)
        return (meaning.loss(codes, queries, noise),)

    trainer = Trainer(meaning, 1e-2, weight_decay=0.0)
    trainer.run(losses_of, lambda: "of what queries mean", num_steps=num_steps)
    return meaning.requires_grad_(False)
