"""The right answers, for scenes written by hand."""

import pytest

from training.shapes import answers
from training.shapes.world import Selector, make_scene

BUSY = make_scene(
    "white",
    ("red", "star", "top left"),
    ("blue", "circle", "center", "small"),
    ("orange", "star", "bottom right", "small"),
)
EMPTY = make_scene("orange")
STAR, RING = Selector(kind="star"), Selector(kind="ring")


def test_a_description_names_everything_in_reading_order():
    assert answers.describe(BUSY) == (
        "A white background with a red star at the top left, a blue circle in the center "
        "and an orange star at the bottom right."
    )


def test_an_empty_image_is_described_by_its_background():
    assert answers.describe(EMPTY) == "An orange background with no shapes."


def test_several_images_are_described_one_after_the_other():
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
    ("answer", "expected"),
    [
        (answers.color_of, "red and orange"),
        (answers.place_of, "top left and bottom right"),
        (answers.size_of, "large and small"),
        (answers.kind_of, "star"),
    ],
)
def test_what_several_shapes_are_like_is_listed_once_each(answer, expected):
    assert answer(BUSY, STAR) == expected


@pytest.mark.parametrize("answer", [answers.color_of, answers.place_of, answers.size_of])
def test_what_is_missing_is_said_to_be_missing(answer):
    assert answer(BUSY, RING) == "There is no ring."


def test_a_missing_color_is_a_missing_shape():
    assert answers.kind_of(BUSY, Selector(color="green")) == "There is no green shape."


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
    assert answers.is_color(BUSY, STAR, "orange") == "yes"
    assert answers.is_color(BUSY, RING, "orange") == "There is no ring."


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
    assert answers.which_has(first, second, STAR) == word


def test_images_are_the_same_only_if_every_word_is():
    smaller = make_scene("white", ("red", "star", "top left", "small"))
    larger = make_scene("white", ("red", "star", "top left", "large"))
    assert answers.are_same(smaller, smaller) == "yes"
    assert answers.are_same(smaller, larger) == "no"
