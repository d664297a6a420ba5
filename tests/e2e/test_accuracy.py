"""The built-in model's exact match over HTTP by precision. On demand: `make accuracy`, minutes.

The questions are about fresh scenes, drawn by three programs that share no code with training.
"""

import os
from collections.abc import Callable
from functools import cache

import pytest
from openai import OpenAI

from tests.e2e.asking import ask_all, choose_cases
from tests.integration.fleet_process import start_fleet
from training.shapes.evaluation import GROUPS, Score

NUM_SCENES = int(os.environ.get("ACCURACY_SCENES", "0"))
PRECISIONS = {
    "fp32": ("--dtype", "float32"),
    "bf16": ("--dtype", "bfloat16"),
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4"),
}
#: What the checkpoint reaches; what it should reach is in the README of the model.
GOALS = {
    "single questions": 0.96,
    "full descriptions": 0.95,
    "two images": 0.97,
    "descriptions of two images": 0.90,
    "follow-up questions": 0.93,
}

pytestmark = [
    pytest.mark.skipif(not NUM_SCENES, reason="on demand: make accuracy"),
    pytest.mark.timeout(3000),
]


@pytest.fixture(scope="module")
def score_of(tmp_path_factory) -> Callable[[str], Score]:
    cases = choose_cases(NUM_SCENES)

    @cache
    def measure(precision: str) -> Score:
        folder = tmp_path_factory.mktemp(precision)
        fleet = start_fleet(folder, *PRECISIONS[precision], engine="torch")
        try:
            with OpenAI(base_url=f"{fleet.url}/v1", api_key="unused") as client:
                return ask_all(client, cases)
        finally:
            fleet.end()

    return measure


@pytest.mark.parametrize("group", GROUPS)
def test_the_goals_are_reached(score_of, group):
    score = score_of("bf16")
    assert score.accuracy(*GROUPS[group]) >= GOALS[group], score.mistakes[:10]


@pytest.mark.parametrize(
    ("precision", "most_lost"), [("fp32", 0.005), ("int8", 0.005), ("int4", 0.02)]
)
def test_little_is_lost_by_fewer_bits(score_of, precision, most_lost):
    assert score_of(precision).accuracy() >= score_of("bf16").accuracy() - most_lost


def test_table(score_of):
    for name, topics in [("all", ()), *GROUPS.items()]:
        shares = [f"{score_of(each).accuracy(*topics):.1%}" for each in PRECISIONS]
        print(f"| {name} | " + " | ".join(shares) + " |")
