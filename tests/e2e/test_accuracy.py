"""The built-in model answers rightly through the whole way: HTTP, Redis, worker, engine, and back.

Exact match on fresh scenes, drawn by three programs that share no code with training. `-s` shows the table even when all is well.
"""

import os

import pytest
from openai import OpenAI
from rich.console import Console

from tests.e2e.asking import ask_all, choose_cases, choose_evenly
from training.shapes.evaluation import GROUPS, Score, report

IS_LONG = bool(os.environ.get("ACCURACY_SCENES"))  #: `make accuracy`
#: Of 50 questions of a group two wrong ones are chance: the goals themselves are the long form's.
SLACK = 0.0 if IS_LONG else 0.05
#: What the checkpoint reaches; what it should reach is in the README of the model.
GOALS = {
    "single questions": 0.96,
    "full descriptions": 0.95,
    "two images": 0.97,
    "descriptions of two images": 0.90,
    "follow-up questions": 0.93,
}


@pytest.fixture(scope="module")
def score(shapes_fleet) -> Score:
    with OpenAI(base_url=f"{shapes_fleet.url}/v1", api_key="unused") as client:
        score = ask_all(client, choose_cases(400) if IS_LONG else choose_evenly(50))
    report(score, console := Console(width=80))
    for group, goal in GOALS.items():
        console.print(f"{group}: {score.accuracy(*GROUPS[group]):.1%} (goal {goal:.0%})")
    return score


@pytest.mark.timeout(400)
@pytest.mark.parametrize("group", GROUPS)
def test_accuracy(score, group):
    topics = GROUPS[group]
    assert sum(score.asked[topic] for topic in topics) >= 50
    assert score.accuracy(*topics) >= GOALS[group] - SLACK, score.mistakes[:10]
