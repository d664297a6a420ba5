"""Exact-match accuracy of the built-in model over HTTP, by precision. On demand: `make accuracy`, minutes.

The questions are about new scenes, drawn by three programs that share no code with training.
"""

import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from openai import OpenAI

from tests.factories_images import image_part, png_url
from tests.integration.fleet_process import start_fleet
from tests.training.shapes.strangers import draw_as_a_stranger
from training.shapes.evaluation import GROUPS, Case, Message, Score, make_cases
from training.shapes.questions import PAIR_TOPICS, SINGLE_TOPICS

NUM_SCENES = int(os.environ.get("ACCURACY_SCENES", "0"))
PRECISIONS = {
    "fp32": ("--dtype", "float32"),
    "bf16": ("--dtype", "bfloat16"),
    "int8": ("--quantization", "int8"),
    "int4": ("--quantization", "int4"),
}
#: Reached by the checkpoint. The README of the model has the intended values.
GOALS = {
    "single questions": 0.97,
    "the first eight topics": 0.97,
    "full descriptions": 0.97,
    "two images": 0.97,
    "descriptions of two images": 0.95,
    "follow-up questions": 0.93,
}

pytestmark = [
    pytest.mark.skipif(not NUM_SCENES, reason="on demand: make accuracy"),
    pytest.mark.timeout(3000),
]


def choose_cases(num_scenes: int) -> list[Case]:
    """Returns the description and five other questions per scene, so that each topic is frequent."""
    chooser = random.Random(0)
    per_scene = len(SINGLE_TOPICS) + len(PAIR_TOPICS) + 1
    cases = list(make_cases(num_scenes, draw=draw_as_a_stranger))
    assert len(cases) == num_scenes * per_scene
    chosen: list[Case] = []
    for start in range(0, len(cases), per_scene):
        by_topic = {case.topic: case for case in cases[start : start + per_scene]}
        description = by_topic.pop("describe")
        chosen += [description, *chooser.sample([*by_topic.values()], 5)]
    return chosen


def ask(client: OpenAI, messages: Sequence[Message]) -> str:
    chat: list[Any] = []
    for message in messages:
        images = [image_part(png_url(image)) for image in message.images]
        text = {"type": "text", "text": message.question}
        chat.append({"role": "user", "content": [*images, text]})
        if message.answer:
            chat.append({"role": "assistant", "content": message.answer})
    answer = client.chat.completions.create(model="shapes", messages=chat, temperature=0)
    return answer.choices[0].message.content or ""


@pytest.fixture(scope="module")
def score_of(tmp_path_factory) -> Callable[[str], Score]:
    cases = choose_cases(NUM_SCENES)

    @cache
    def measure(precision: str) -> Score:
        folder = tmp_path_factory.mktemp(precision)
        with (
            start_fleet(folder, *PRECISIONS[precision], engine="torch") as fleet,
            OpenAI(base_url=f"{fleet.url}/v1", api_key="unused") as client,
            ThreadPoolExecutor(16) as pool,
        ):
            answers = pool.map(lambda case: ask(client, case.messages), cases)
            return Score(list(zip(cases, answers, strict=True)))

    return measure


@pytest.mark.parametrize("group", GROUPS)
def test_the_goals_are_reached(score_of, group):
    score = score_of("bf16")
    assert score.accuracy(*GROUPS[group]) >= GOALS[group], score.mistakes[:10]


@pytest.mark.parametrize(
    ("precision", "most_lost"), [("fp32", 0.005), ("int8", 0.005), ("int4", 0.02)]
)
def test_quantization_loses_little_accuracy(score_of, precision, most_lost):
    assert score_of(precision).accuracy() >= score_of("bf16").accuracy() - most_lost


def test_table(score_of):
    for name, topics in [("all", ()), *GROUPS.items()]:
        shares = [f"{score_of(each).accuracy(*topics):.1%}" for each in PRECISIONS]
        print(f"| {name} | " + " | ".join(shares) + " |")
