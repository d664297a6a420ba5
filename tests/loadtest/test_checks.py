"""Only complete and correct answers count; answers of the mock are known from its algorithm."""

import pytest

from loadtest.albums import NoiseAlbum
from loadtest.asking import fault_of, mock_answer
from loadtest.client import Answer
from loadtest.scenarios import Question, text_part, user_message

MESSAGES = [user_message([text_part("hello")])]
USAGE = {"completion_tokens": 4, "prompt_tokens": 20}
RIGHT = mock_answer(MESSAGES, USAGE, 4)


def fault(model: str = "mock", expected: str | None = None, salted: bool = False, **changes) -> str:
    answer = Answer(1.0, RIGHT, "length", USAGE)
    for name, value in changes.items():
        setattr(answer, name, value)
    return fault_of(answer, Question(MESSAGES, expected), model, 4, salted)


def test_right_answer_has_no_fault():
    assert fault() == ""
    assert fault(finish_reason="stop", text=" ".join(RIGHT.split()[:3])) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text": RIGHT[:-1]}, "wrong"),
        ({"text": RIGHT.replace(" ", "  ", 1)}, "wrong"),
        ({"usage": {"completion_tokens": 3}}, "fewer tokens"),
        ({"usage": {"completion_tokens": 5}}, "more tokens"),
        ({"finish_reason": "content_filter"}, "content_filter"),
    ],
)
def test_another_text_length_or_finish_reason_is_a_fault(changes, words):
    assert words in fault(**changes)


def test_known_answers_are_compared_and_unknown_ones_are_not():
    assert fault("shapes", expected="red", text=" red ") == ""
    assert fault("shapes", expected="red", text="blue") == "the answer is wrong"
    assert fault("other", text="whatever") == ""


def test_answers_about_images_with_a_key_are_not_compared():
    album = NoiseAlbum(0, 2_000)
    messages = [user_message([{"type": "image_url", "image_url": {"url": album.fixed().urls[0]}}])]
    answer = Answer(1.0, "ba ba", "stop", {"completion_tokens": 3, "prompt_tokens": 9})
    assert fault_of(answer, Question(messages), "mock", 4) == "the answer is wrong"
    assert fault_of(answer, Question(messages), "mock", 4, is_salted=True) == ""
