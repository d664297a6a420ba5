"""Queries are true for the scenes that they were created for."""

from random import Random

import numpy as np
import pytest

from training.shapes.gallery import encode
from training.shapes.world import Scene, Shape, sample_scene
from training.shapes_clip.evaluation import evaluate
from training.shapes_clip.queries import KINDS_OF_QUERIES, Fact, Query, sample_query

TWO_STARS = Scene(
    "white", (Shape("star", "blue", "small", "top left"), Shape("star", "red", "large", "center"))
)


@pytest.mark.parametrize("kind", KINDS_OF_QUERIES)
def test_a_query_is_true_of_its_scene(kind):
    rng = Random(kind)
    for scene in [sample_scene(rng) for _ in range(40)]:
        query = sample_query(scene, rng, kind)
        assert query.holds_of(encode(scene)[None]).tolist() == [True], query


@pytest.mark.parametrize(
    ("query", "is_true"),
    [
        (Query("a red star", (Fact("star", "red"),)), True),
        (Query("a red circle", (Fact("circle", "red"),)), False),
        (Query("a small red star", (Fact("star", "red", "small"),)), False),
        (Query("a star and a red star", (Fact("star"), Fact("star", "red"))), True),
        (Query("two red stars", (Fact("star", "red"), Fact("star", "red"))), False),
        (Query("a white background", (), "white"), True),
        (Query("a red star on black", (Fact("star", "red"),), "black"), False),
        (Query("nothing but a red star", (Fact("star", "red"),), None, is_complete=True), False),
    ],
    ids=lambda value: value.text if isinstance(value, Query) else "",
)
def test_the_truth_of_queries(query, is_true):
    assert query.holds_of(encode(TWO_STARS)[None]).tolist() == [is_true]


def test_precision_is_computed_from_the_order():
    scenes = [
        TWO_STARS,
        Scene("black", (Shape("ring", "red", "large", "center"),)),
        Scene("gray", ()),
    ]
    codes = np.stack([encode(scene) for scene in scenes])
    query = Query("something red", (Fact(color="red"),))
    [row] = evaluate([("one", query)], np.array([[0.1, 0.3, 0.2]]), codes).values()
    assert (row.precision_at_1, row.recall_at_5, row.chance) == (1.0, 1.0, pytest.approx(2 / 3))
    assert row.mean_average_precision == pytest.approx((1 + 2 / 3) / 2)
    [row] = evaluate([("one", query)], np.array([[0.1, 0.2, 0.3]]), codes).values()
    assert row.precision_at_1 == 0.0
