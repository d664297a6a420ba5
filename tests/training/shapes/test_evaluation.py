"""The evaluation asks about everything and counts exactly."""

import pytest

from training.shapes.evaluation import Case, Message, evaluate, make_cases
from training.shapes.questions import PAIR_TOPICS, SINGLE_TOPICS


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return list(make_cases(3))


def test_every_topic_is_asked_once_for_each_scene(cases):
    topics = [case.topic for case in cases]
    assert topics == 3 * [*SINGLE_TOPICS, *PAIR_TOPICS, "conversation"]


def test_one_who_knows_is_always_right(cases):
    known = {id(case.messages): case.answer for case in cases}
    score = evaluate(lambda messages: f" {known[id(messages)]}\n", cases)
    assert score.accuracy() == 1.0
    assert not score.mistakes


def test_one_who_does_not_know_is_mostly_wrong(cases):
    score = evaluate(lambda messages: "yes", cases)
    assert score.accuracy("describe") == 0.0
    assert len(score.mistakes) == sum(score.asked.values()) - sum(score.right.values())


def test_the_last_answer_of_a_conversation_is_not_given_away(cases):
    for case in cases:
        assert case.messages[-1].answer == ""
        assert all(
            isinstance(message, Message) and message.answer for message in case.messages[:-1]
        )


def test_the_same_seed_asks_the_same(cases):
    again = list(make_cases(3))
    assert [case.messages[-1].question for case in again] == [
        case.messages[-1].question for case in cases
    ]
