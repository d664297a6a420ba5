"""What fewer bits cost: the built-in model's exact match by precision. On demand: `make accuracy`, minutes.

With `ACCURACY_PARTS` naming a directory, what was asked is kept there, and a run that was cut goes on.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from openai import OpenAI
from rich.console import Console

from tests.e2e.asking import ask_all, choose_cases
from tests.integration.fleet_process import start_fleet
from training.shapes.evaluation import GROUPS, Case, Score

NUM_SCENES = int(os.environ.get("ACCURACY_SCENES", "0"))
PARTS = os.environ.get("ACCURACY_PARTS")
PORTION = 300  #: questions after which it is kept how they were answered
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


class KeptScore(Score):
    """A score that a file remembers, if there is one."""

    def __init__(self, file: Path | None) -> None:
        super().__init__()
        self._file = file
        if file and file.exists():
            kept = json.loads(file.read_text())
            self.asked, self.right = Counter(kept["asked"]), Counter(kept["right"])

    def add(self, portion: Score) -> None:
        self.asked += portion.asked
        self.right += portion.right
        if self._file:
            self._file.write_text(json.dumps({"asked": self.asked, "right": self.right}))


@cache
def all_cases() -> Sequence[Case]:
    return choose_cases(NUM_SCENES)


@pytest.fixture(scope="module")
def score_of(tmp_path_factory) -> Callable[[str], Score]:
    @cache
    def measure(precision: str) -> Score:
        score = KeptScore(Path(PARTS) / f"{precision}-{NUM_SCENES}.json" if PARTS else None)
        if score.asked.total() == len(all_cases()):
            return score
        folder = tmp_path_factory.mktemp(precision)
        fleet = start_fleet(folder, *PRECISIONS[precision], engine="torch")
        try:
            with OpenAI(base_url=f"{fleet.url}/v1", api_key="unused") as client:
                while rest := all_cases()[score.asked.total() :]:
                    score.add(ask_all(client, rest[:PORTION]))
        finally:
            fleet.end()
        return score

    return measure


@pytest.mark.parametrize("precision", PRECISIONS)
def test_most_answers_are_right(score_of, precision):
    assert score_of(precision).accuracy() > 0.9


@pytest.mark.parametrize(
    ("precision", "reference", "most_lost"), [("int8", "bf16", 0.005), ("int4", "bf16", 0.02)]
)
def test_little_is_lost(score_of, precision, reference, most_lost):
    assert score_of(precision).accuracy() >= score_of(reference).accuracy() - most_lost


def test_table(score_of, pytestconfig):
    rows = [("all", ()), *GROUPS.items()]
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        console = Console(width=100)
        for name, topics in rows:
            shares = [f"{score_of(each).accuracy(*topics):.1%}" for each in PRECISIONS]
            console.print(f"| {name} | " + " | ".join(shares) + " |")
