"""What scenes and queries mean is near where the one is true of the other."""

from random import Random

import numpy as np
import pytest
import torch

from training.shapes.gallery import encode
from training.shapes.world import make_scene, sample_scene
from training.shapes_clip.evaluation import evaluate, make_queries
from training.shapes_clip.meaning import (
    features_of_queries,
    features_of_scenes,
    learn_meaning,
)
from training.shapes_clip.queries import SINGLE_FACTS, Fact, Query

SCENE = make_scene("white", ("red", "star", "center"), ("blue", "star", "top left", "small"))


@pytest.mark.parametrize(
    ("query", "agreement"),
    [
        (Query("", (Fact("star"),)), 1),
        (Query("", (Fact("star", "red"),)), 1),
        (Query("", (Fact("ring", "red"),)), 0),
        (Query("", (Fact("star", "red", "small"),)), 0),
        (Query("", (Fact("star", None, None, "top left"),)), 1),
        (Query("", (Fact("star", "red", None, "top left"),)), 2 / 3),
        (Query("", (Fact("star", "red"), Fact("star", "blue")), "white"), 3),
        (Query("", (), "black"), 0),
    ],
)
def test_a_scene_has_what_a_true_query_asks_for(query, agreement):
    [asked], [there] = features_of_queries([query]), features_of_scenes(encode(SCENE)[None])
    assert asked @ there == pytest.approx(agreement)


def test_what_is_nearest_is_true_after_a_little_learning():
    meaning = learn_meaning(192, num_steps=50, batch_size=256)
    rng = Random(1)
    scenes = [sample_scene(rng) for _ in range(300)]
    codes = np.stack([encode(scene) for scene in scenes])
    asked = make_queries(scenes, 40)
    vectors, queries = meaning.of_scenes(codes), meaning.of_queries([query for _, query in asked])
    assert torch.allclose(vectors.norm(dim=1), torch.ones(len(scenes)))
    rows = evaluate(asked, (queries @ vectors.T).numpy(), codes)
    assert np.mean([rows[kind].precision_at_1 for kind in SINGLE_FACTS]) > 0.95
