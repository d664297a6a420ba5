"""What fewer bits cost: the built-in model's exact match by precision. On demand: `make accuracy`, minutes."""

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


@pytest.mark.parametrize("precision", PRECISIONS)
def test_most_answers_are_right(score_of, precision):
    assert score_of(precision).accuracy() > 0.9


@pytest.mark.parametrize(
    ("precision", "reference", "most_lost"), [("int8", "bf16", 0.005), ("int4", "bf16", 0.02)]
)
def test_little_is_lost(score_of, precision, reference, most_lost):
    assert score_of(precision).accuracy() >= score_of(reference).accuracy() - most_lost


def test_table(score_of):
    for name, topics in [("all", ()), *GROUPS.items()]:
        shares = [f"{score_of(each).accuracy(*topics):.1%}" for each in PRECISIONS]
        print(f"| {name} | " + " | ".join(shares) + " |")
