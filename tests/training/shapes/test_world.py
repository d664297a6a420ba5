"""Scenes follow the rules of the image world; questions are varied and have the right answer."""

from random import Random

import pytest

from training.shapes.conversations import sample_conversation
from training.shapes.questions import SINGLE_TOPICS, Asker, ask_about_pair
from training.shapes.world import MAX_SHAPES, Scene, Shape, sample_scene


def test_sampled_scenes_are_varied_and_valid():
    scenes = [sample_scene(Random(seed)) for seed in range(300)]  # raises for an invalid scene
    assert {len(scene.shapes) for scene in scenes} == set(range(MAX_SHAPES + 1))
    assert len(set(scenes)) > 250


@pytest.mark.parametrize("topic", SINGLE_TOPICS)
def test_every_topic_fills_its_slots_and_names_one_of_several_images(topic):
    for seed in range(100):
        rng, named = Random(seed), seed % 2 == 0
        question = Asker(rng, sample_scene(rng), index=1, named=named).ask(topic)
        assert question.answer
        assert not set("{}") & set(question.text)
        assert not named or "second" in question.text.lower()


def test_every_image_of_a_conversation_is_shown_once():
    for seed in range(100):
        rng = Random(seed)
        scenes = tuple(sample_scene(rng) for _ in range(rng.randint(1, 4)))
        turns = sample_conversation(scenes, 5, rng, at_once=seed % 2 == 0)
        assert len(turns) == 5
        assert sum(turn.num_images for turn in turns) == len(scenes)
        assert turns[0].num_images >= 1


def test_images_are_the_same_only_if_every_word_is():
    smaller = Scene("white", (Shape("star", "red", "small", "top left"),))
    larger = Scene("white", (Shape("star", "red", "large", "top left"),))
    for seed in range(40):  # some seeds ask for differences
        same, other = (
            ask_about_pair("same", smaller, each, Random(seed)) for each in (smaller, larger)
        )
        assert same.text == other.text
        assert {same.answer, other.answer} == {"yes", "no"}
