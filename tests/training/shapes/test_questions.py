"""Questions read like a person's and carry the right answer."""

from random import Random

import pytest

from training.shapes.conversations import sample_conversation
from training.shapes.questions import (
    PAIR_TOPICS,
    SINGLE_TOPICS,
    Asker,
    ask_about_pair,
    follow_up,
    vary,
)
from training.shapes.world import Shape, make_scene, sample_scene

SCENE = make_scene("white", ("red", "star", "top left"))
PLAIN_QUESTIONS = {
    "describe": "Describe the image.",
    "background": "What color is the background?",
}


@pytest.mark.parametrize(("topic", "text"), PLAIN_QUESTIONS.items())
def test_a_plain_question_uses_the_first_phrasing(topic, text):
    assert Asker(Random(0), SCENE, plain=True).ask(topic).text == text


@pytest.mark.parametrize("topic", SINGLE_TOPICS)
def test_every_topic_fills_its_slots(topic):
    for seed in range(100):
        rng = Random(seed)
        question = Asker(rng, sample_scene(rng), index=1, named=seed % 2 == 0).ask(topic)
        assert question.topic == topic
        assert question.answer
        assert not set("{}") & set(question.text)


@pytest.mark.parametrize("topic", SINGLE_TOPICS)
def test_a_question_about_one_of_several_images_names_it(topic):
    for seed in range(50):
        rng = Random(seed)
        question = Asker(rng, sample_scene(rng), index=1, named=True).ask(topic)
        assert "second" in question.text.lower()


@pytest.mark.parametrize("topic", PAIR_TOPICS)
def test_every_pair_topic_fills_its_slots(topic):
    for seed in range(100):
        rng = Random(seed)
        question = ask_about_pair(topic, sample_scene(rng), sample_scene(rng), rng)
        assert not set("{}") & set(question.text)


def test_yes_and_no_are_both_common():
    rng = Random(0)
    said = [Asker(rng, sample_scene(rng)).ask("exists").answer for _ in range(400)]
    assert 0.3 < said.count("yes") / len(said) < 0.7


def test_a_follow_up_asks_about_the_shape_before():
    shape = Shape("ring", "blue", "small", "center")
    answers = {follow_up(shape, Random(seed)).answer for seed in range(60)}
    assert answers == {"ring", "blue", "small", "center"}


def test_varying_a_question_keeps_its_words():
    for seed in range(200):
        varied = vary("What color is the star?", Random(seed)).lower()
        assert "star" in varied
        assert "color" in varied or "colour" in varied


def test_every_image_of_a_conversation_is_shown_once():
    for seed in range(100):
        rng = Random(seed)
        scenes = tuple(sample_scene(rng) for _ in range(rng.randint(1, 4)))
        conversation = sample_conversation(scenes, 5, rng)
        assert len(conversation.turns) == 5
        assert conversation.num_images == len(scenes)
        assert conversation.turns[0].num_images >= 1
