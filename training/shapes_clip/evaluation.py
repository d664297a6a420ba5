"""Precision and recall of searches, by kind of query."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from training.shapes.world import Scene
from training.shapes_clip.queries import KINDS_OF_QUERIES, Query, sample_query


@dataclass(frozen=True, slots=True)
class Row:
    """Results of the queries of one kind, as fractions.

    `chance`: precision at 1 of a random order. `recall_at_5`: relative to the number of true scenes, at most five.
    """

    num_queries: int
    precision_at_1: float
    recall_at_5: float
    mean_average_precision: float
    chance: float


def make_queries(scenes: Sequence[Scene], num_of_a_kind: int) -> list[tuple[str, Query]]:
    """Different queries with their kinds. Each query matches at least one of the scenes."""
    rng = Random(1)
    made = []
    for kind in KINDS_OF_QUERIES:
        found: dict[Query, None] = {}
        for _ in range(100 * num_of_a_kind):
            scene = rng.choice(scenes)
            if len(scene.shapes) >= 2:
                found[sample_query(scene, rng, kind)] = None
            if len(found) == num_of_a_kind:
                break
        made += [(kind, query) for query in found]
    return made


def evaluate(
    queries: Sequence[tuple[str, Query]], scores: np.ndarray, codes: np.ndarray
) -> dict[str, Row]:
    """The results of each kind. Shapes: `scores` (queries, scenes), `codes` uint8 (scenes, CODE_LENGTH)."""
    results: dict[str, list[tuple[float, float, float, float]]] = {}
    for (kind, query), row in zip(queries, scores, strict=True):
        is_true = query.holds_of(codes)
        results.setdefault(kind, []).append(_measure(is_true[np.argsort(-row, kind="stable")]))
    return {
        kind: Row(len(found), *np.mean(found, axis=0).tolist()) for kind, found in results.items()
    }


def _measure(ordered: np.ndarray) -> tuple[float, float, float, float]:
    ranks = 1 + np.flatnonzero(ordered)
    precision = float(np.mean(np.arange(1, len(ranks) + 1) / ranks))
    recall = float(ordered[:5].sum() / min(5, len(ranks)))
    return float(ordered[0]), recall, precision, float(ordered.mean())
