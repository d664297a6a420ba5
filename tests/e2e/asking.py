"""Puts the questions of `training.shapes.evaluation` to a fleet, over HTTP."""

import base64
import io
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

from tests.training.shapes.strangers import draw_as_a_stranger
from training.shapes.evaluation import GROUPS, Case, Message, Score, make_cases
from training.shapes.questions import PAIR_TOPICS, SINGLE_TOPICS

NUM_CLIENTS = 16
QUESTIONS_PER_SCENE = 5


def choose_cases(num_scenes: int) -> list[Case]:
    """Of every scene the description and a few other questions, so that each topic comes up often."""
    chooser = random.Random(0)
    groups: dict[str, list[Case]] = {}
    chosen: list[Case] = []
    for scene in scenes(num_scenes):
        groups = {case.topic: [case] for case in scene}
        [description] = groups.pop("describe")
        rest = [case for group in groups.values() for case in group]
        chosen += [description, *chooser.sample(rest, QUESTIONS_PER_SCENE)]
    return chosen


def choose_evenly(num_scenes: int) -> list[Case]:
    """Of every scene a question of each group, and three single ones."""
    chooser = random.Random(0)
    chosen: list[Case] = []
    for scene in scenes(num_scenes):
        for topics in GROUPS.values():
            known = [case for case in scene if case.topic in topics]
            chosen += chooser.sample(known, 3 if topics == GROUPS["single questions"] else 1)
    return chosen


def scenes(num_scenes: int) -> list[Sequence[Case]]:
    """All questions about each of them."""
    per_scene = len(SINGLE_TOPICS) + len(PAIR_TOPICS) + 1
    cases = list(make_cases(num_scenes, draw=draw_as_a_stranger))
    assert len(cases) == num_scenes * per_scene
    return [cases[start : start + per_scene] for start in range(0, len(cases), per_scene)]


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
        images = [
            {"type": "image_url", "image_url": {"url": png_url(image)}} for image in message.images
        ]
        text = {"type": "text", "text": message.question}
        chat.append({"role": "user", "content": [*images, text]})
        if message.answer:
            chat.append({"role": "assistant", "content": message.answer})
    answer = client.chat.completions.create(model="shapes", messages=chat, temperature=0)
    return answer.choices[0].message.content.strip()


def png_url(image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
