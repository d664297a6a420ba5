"""What is good is what was asked for, of streams and of whole answers."""

import pytest

from loadtest.record import Objective, parse_objective
from tests.loadtest.factories import record


def test_limits_are_milliseconds():
    objective = parse_objective("ttft=500, tpot=50,e2e=5000")
    assert objective == Objective(ttft_s=0.5, tpot_s=0.05, e2e_s=5.0)
    assert str(objective) == "TTFT <= 500 ms and TPOT <= 50 ms and E2E <= 5000 ms"
    assert parse_objective("") == Objective()


@pytest.mark.parametrize(
    "text", ["ttft", "ttft=", "ttft=x", "itl=5", "ttft=0", "e2e=-1", "e2e=nan"]
)
def test_objective_that_nobody_can_keep_is_refused(text):
    with pytest.raises(ValueError):
        parse_objective(text)


@pytest.mark.parametrize(
    ("objective", "changes", "is_kept"),
    [
        ("ttft=200", {"ttft_s": 0.2}, True),
        ("ttft=200", {"ttft_s": 0.21}, False),
        ("ttft=200", {"ttft_s": 0.15, "waited_s": 0.1}, True),
        ("tpot=100", {"ttft_s": 0.1, "e2e_s": 0.5}, True),
        ("tpot=100", {"ttft_s": 0.1, "e2e_s": 0.6}, False),
        ("e2e=500", {"e2e_s": 0.6}, False),
        ("ttft=200", {"e2e_s": 9.0}, True),
        ("ttft=200,tpot=100", {"e2e_s": 0.59}, True),
        ("ttft=200,tpot=100", {"e2e_s": 0.61}, False),
        ("", {"e2e_s": 9.0}, True),
        ("", {"error": "status 503"}, False),
    ],
)
def test_answers_are_judged_by_what_was_measured(objective, changes, is_kept):
    assert parse_objective(objective).is_kept(record(**changes)) == is_kept
