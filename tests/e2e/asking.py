"""Puts the questions of `training.shapes.evaluation` to a fleet, over HTTP."""

import base64
import io
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

from tests.training.shapes.strangers import draw_as_a_stranger
from training.shapes.evaluation import Case, Message, Score, make_cases
from training.shapes.questions import PAIR_TOPICS, SINGLE_TOPICS

NUM_CLIENTS = 16
QUESTIONS_PER_SCENE = 5


def choose_cases(num_scenes: int) -> list[Case]:
    """Of every scene the description and a few other questions, so that each topic comes up often."""
    chooser = random.Random(0)
    per_scene = len(SINGLE_TOPICS) + len(PAIR_TOPICS) + 1
    cases = list(make_cases(num_scenes, draw=draw_as_a_stranger))
    assert len(cases) == num_scenes * per_scene
    chosen: list[Case] = []
    for start in range(0, len(cases), per_scene):
        by_topic = {case.topic: case for case in cases[start : start + per_scene]}
        description = by_topic.pop("describe")
        chosen += [description, *chooser.sample([*by_topic.values()], QUESTIONS_PER_SCENE)]
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
