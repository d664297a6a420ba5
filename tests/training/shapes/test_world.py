"""Scenes keep to the rules of the image world; questions read like a person's and carry the right answer."""

from random import Random

import pytest

from training.shapes import answers
from training.shapes.conversations import sample_conversation
from training.shapes.questions import (
    PAIR_TOPICS,
    SINGLE_TOPICS,
    Asker,
    ask_about_pair,
    follow_up,
    vary,
)
from training.shapes.world import (
    MAX_SHAPES,
    PLACES,
    Scene,
    Selector,
    Shape,
    make_scene,
    sample_scene,
    sample_variation,
)


def differences(one: Scene, other: Scene) -> int:
    """In how many places, or in the background, two scenes differ."""
    return sum(one.at(place) != other.at(place) for place in PLACES) + (
        one.background != other.background
    )


def test_sampled_scenes_are_varied_and_lawful():
    scenes = [sample_scene(Random(seed)) for seed in range(300)]  # an unlawful one raises
    assert {len(scene.shapes) for scene in scenes} == set(range(MAX_SHAPES + 1))
    assert len(set(scenes)) > 250


def test_a_variation_differs_in_one_thing():
    for seed in range(300):
        rng = Random(seed)
        scene = sample_scene(rng)
        varied = sample_variation(scene, rng)
        assert varied != scene
        assert differences(scene, varied) <= 2  # a shape that moved leaves one place for another


@pytest.mark.parametrize(
    ("background", "place", "what"),
    [("red", "top left", "background"), ("white", "center", "place")],
)
def test_scenes_that_cannot_be_are_refused(background, place, what):
    with pytest.raises(ValueError, match=what):
        make_scene(background, ("red", "star", "center"), ("blue", "ring", place))


@pytest.mark.parametrize(
    ("selector", "noun", "nouns"),
    [
        (Selector(), "shape", "shapes"),
        (Selector(color="red"), "red shape", "red shapes"),
        (Selector("cross"), "cross", "crosses"),
        (Selector("star", "red"), "red star", "red stars"),
    ],
)
def test_a_selector_has_words(selector, noun, nouns):
    assert (selector.noun, selector.nouns) == (noun, nouns)


def test_a_selector_picks_what_matches():
    star, ring = Shape("star", "red", "large", "top left"), Shape("ring", "red", "small", "center")
    scene = Scene("white", (star, ring))
    assert Selector(kind="star").pick(scene) == (star,)
    assert Selector(color="red").pick(scene) == (star, ring)
    assert Selector("ring", "blue").pick(scene) == ()


SCENE = make_scene("white", ("red", "star", "top left"))


@pytest.mark.parametrize(
    ("topic", "text"),
    [("describe", "Describe the image."), ("background", "What color is the background?")],
)
def test_a_plain_question_uses_the_first_phrasing(topic, text):
    assert Asker(Random(0), SCENE, plain=True).ask(topic).text == text


@pytest.mark.parametrize("topic", SINGLE_TOPICS)
def test_every_topic_fills_its_slots_and_names_one_of_several_images(topic):
    for seed in range(100):
        rng, named = Random(seed), seed % 2 == 0
        question = Asker(rng, sample_scene(rng), index=1, named=named).ask(topic)
        assert question.topic == topic
        assert question.answer
        assert not set("{}") & set(question.text)
        assert not named or "second" in question.text.lower()


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


def test_every_image_of_a_conversation_is_shown_once():
    for seed in range(100):
        rng = Random(seed)
        scenes = tuple(sample_scene(rng) for _ in range(rng.randint(1, 4)))
        conversation = sample_conversation(scenes, 5, rng)
        assert len(conversation.turns) == 5
        assert sum(turn.num_images for turn in conversation.turns) == len(scenes)
        assert conversation.turns[0].num_images >= 1


BUSY = make_scene(
    "white",
    ("red", "star", "top left"),
    ("blue", "circle", "center", "small"),
    ("orange", "star", "bottom right", "small"),
)
EMPTY = make_scene("orange")
STAR, RING = Selector(kind="star"), Selector(kind="ring")


def test_images_are_described_in_reading_order_and_one_after_the_other():
    assert answers.describe(BUSY) == (
        "A white background with a red star at the top left, a blue circle in the center "
        "and an orange star at the bottom right."
    )
    assert answers.describe(EMPTY) == "An orange background with no shapes."
    one = make_scene("black", ("red", "ring", "top center"))
    assert answers.describe_all((one, EMPTY)) == (
        "First image: A black background with a red ring at the top center. "
        "Second image: An orange background with no shapes."
    )


@pytest.mark.parametrize(
    ("selector", "number"),
    [
        (Selector(), "3"),
        (STAR, "2"),
        (RING, "0"),
        (Selector(color="blue"), "1"),
        (Selector("star", "red"), "1"),
    ],
)
def test_shapes_are_counted(selector, number):
    assert answers.count(BUSY, selector) == number


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("color", "red and orange"),
        ("place", "top left and bottom right"),
        ("size", "large and small"),
        ("kind", "star"),
    ],
)
def test_what_several_shapes_are_like_is_listed_once_each(name, expected):
    assert answers.property_of(BUSY, STAR, name) == expected


def test_what_is_missing_is_said_to_be_missing():
    for name in ("color", "place", "size"):
        assert answers.property_of(BUSY, RING, name) == "There is no ring."
    green = answers.property_of(BUSY, Selector(color="green"), "kind")
    assert green == "There is no green shape."


@pytest.mark.parametrize(
    ("place", "content"), [("bottom right", "an orange star"), ("top right", "nothing")]
)
def test_a_place_holds_one_shape_or_nothing(place, content):
    assert answers.content_at(BUSY, place) == content


def test_yes_and_no():
    assert answers.exists(BUSY, Selector("circle", "blue")) == "yes"
    assert answers.exists(BUSY, Selector("circle", "red")) == "no"
    assert answers.is_at(BUSY, STAR, "top left") == "yes"
    assert answers.is_at(BUSY, STAR, "center") == "no"
    assert answers.is_so(BUSY, STAR, "color", "orange") == "yes"
    assert answers.is_so(BUSY, RING, "color", "orange") == "There is no ring."


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        (BUSY, BUSY, "both"),
        (BUSY, EMPTY, "first"),
        (EMPTY, BUSY, "second"),
        (EMPTY, EMPTY, "neither"),
    ],
)
def test_which_image_has_a_shape(first, second, word):
    assert answers.which(bool(STAR.pick(first)), bool(STAR.pick(second))) == word


def test_images_are_the_same_only_if_every_word_is():
    smaller = make_scene("white", ("red", "star", "top left", "small"))
    larger = make_scene("white", ("red", "star", "top left", "large"))
    rng = Random(0)
    assert ask_about_pair("same", smaller, smaller, rng, plain=True).answer == "yes"
    assert ask_about_pair("same", smaller, larger, rng, plain=True).answer == "no"
