"""The built-in model answers rightly through the whole way: HTTP, Redis, worker, engine, and back.

Exact match on fresh scenes drawn by many programs' habits. `-s` shows the table even when all is well.
"""

import base64
import io
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import OpenAI
from rich.console import Console

from engines.shapes.evaluation import Case, Message, Score, make_cases, report
from engines.shapes.questions import PAIR_TOPICS, SINGLE_TOPICS
from tests.integration.fleet_process import Served, start_fleet

NUM_SCENES = 300
NUM_CLIENTS = 16
QUESTIONS_PER_SCENE = 5
GROUPS = {
    "single questions": tuple(topic for topic in SINGLE_TOPICS if topic != "describe"),
    "full descriptions": ("describe",),
    "two pictures": PAIR_TOPICS,
    "follow-up questions": ("conversation",),
}
#: What the model is to reach. The checkpoint of today is not there yet: its decoder needs a longer training.
GOALS = {
    "single questions": 0.97,
    "full descriptions": 0.95,
    "two pictures": 0.93,
    "follow-up questions": 0.93,
}
#: What the checkpoint of today reaches, less some points for the luck of the draw: it may not get worse.
FLOORS = {
    "single questions": 0.75,
    "full descriptions": 0.42,
    "two pictures": 0.55,
    "follow-up questions": 0.60,
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory) -> Iterator[Served]:
    served = start_fleet(tmp_path_factory.mktemp("accuracy"), engine="torch")
    yield served
    served.end()


@pytest.fixture(scope="module")
def score(fleet, pytestconfig) -> Score:
    with OpenAI(base_url=f"{fleet.url}/v1", api_key="unused") as client:
        score = ask_all(client, choose_cases())
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        report(score, console := Console(width=80))
        for group, goal in GOALS.items():
            console.print(f"{group}: {score.accuracy(*GROUPS[group]):.1%} (goal {goal:.0%})")
    return score


def choose_cases() -> list[Case]:
    """Of every scene the description and a few other questions, so that each topic comes up often."""
    chooser = random.Random(0)
    groups: dict[str, list[Case]] = {}
    per_scene = len(SINGLE_TOPICS) + len(PAIR_TOPICS) + 1
    cases = list(make_cases(NUM_SCENES))
    assert len(cases) == NUM_SCENES * per_scene
    chosen: list[Case] = []
    for start in range(0, len(cases), per_scene):
        groups = {case.topic: [case] for case in cases[start : start + per_scene]}
        [description] = groups.pop("describe")
        rest = [case for group in groups.values() for case in group]
        chosen += [description, *chooser.sample(rest, QUESTIONS_PER_SCENE)]
    return chosen


def ask_all(client: OpenAI, cases: Sequence[Case]) -> Score:
    score = Score()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        answers = pool.map(lambda case: ask(client, case.messages), cases)
        for case, said in zip(cases, answers, strict=True):
            score.asked[case.topic] += 1
            score.right[case.topic] += said == case.answer
            if said != case.answer:
                score.mistakes.append((case, said))
    return score


def ask(client: OpenAI, messages: Sequence[Message]) -> str:
    chat = []
    for message in messages:
        pictures = [
            {"type": "image_url", "image_url": {"url": png_url(picture)}}
            for picture in message.pictures
        ]
        text = {"type": "text", "text": message.question}
        chat.append({"role": "user", "content": [*pictures, text]})
        if message.answer:
            chat.append({"role": "assistant", "content": message.answer})
    answer = client.chat.completions.create(model="shapes", messages=chat, temperature=0)
    return answer.choices[0].message.content.strip()


def png_url(picture) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("group", GROUPS)
def test_accuracy_is_no_worse_than_it_was(score, group):
    topics = GROUPS[group]
    assert sum(score.asked[topic] for topic in topics) >= 50
    assert score.accuracy(*topics) >= FLOORS[group], score.mistakes[:10]
