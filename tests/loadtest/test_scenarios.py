"""Scenarios: equal questions for equal seeds, unique images, and conversations that continue."""

import random

import pytest

from loadtest.albums import NoiseAlbum, create_album
from loadtest.scenarios import MAX_TURNS, SCENARIOS, Conversation, Question

NEW = ("text", "image", "several images")


def urls(question: Question) -> list[str]:
    parts = [part for message in question.messages for part in message["content"]]
    return [part["image_url"]["url"] for part in parts if "image_url" in part]


def ask_many(name: str, number: int = 30, album=None) -> list[Question]:
    scenario = SCENARIOS[name](album or NoiseAlbum(0, 2_000))
    draw = random.Random(5)
    return [scenario(draw) for _ in range(number)]


def test_same_seed_asks_the_same():
    for name in SCENARIOS:
        first, second = ask_many(name), ask_many(name)
        assert [each.messages for each in first] == [each.messages for each in second]


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("model", ["mock", "shapes"])
def test_new_images_differ_between_runs(name, model):
    asked = [ask_many(name, album=create_album(model, run, 2_000)) for run in (1, 2)]
    images = [url for run in asked for question in run for url in urls(question)]
    texts = [repr(question.messages) for question in asked[0]]
    assert len(set(images)) == len(images)
    assert len(set(texts)) == len(texts)
    assert bool(images) == (name != "text")


def test_conversation_continues_with_its_history_and_ends():
    conversation, draw = Conversation(NoiseAlbum(0, 2_000)), random.Random(0)
    lengths, images = [], set()
    for turn in range(2 * MAX_TURNS):
        question = conversation.next_question(draw)
        lengths.append(len(question.messages))
        images |= set(urls(question))
        said = [message["content"] for message in question.messages[1::2]]
        assert said == [f"answer {n}" for n in range(turn % MAX_TURNS)]
        question.on_answer(f"answer {turn % MAX_TURNS}")
    assert lengths == 2 * [2 * turn + 1 for turn in range(MAX_TURNS)]
    assert len(images) == 2
    waiting = [
        conversation.next_question(draw) for _ in range(2)
    ]  # a waiting conversation is not asked again
    assert [len(each.messages) for each in waiting] == [1, 1]
    assert urls(waiting[0]) != urls(waiting[1])
