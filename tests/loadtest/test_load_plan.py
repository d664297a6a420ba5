"""The load follows its plan, and arrivals of an open loop are a Poisson process with the planned rate."""

import random
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from loadtest.load_plan import arrivals, level_at, make_plan, parse_levels, phases
from loadtest.record import Plan


@pytest.mark.parametrize("text", ["1,,2", "1..", "1..2..3", "0", "-1", "nan", "1e9"])
def test_invalid_load_is_refused(text):
    with pytest.raises(ValueError, match=r"load|ramp|neither"):
        parse_levels(text)


def test_a_load_has_users_or_a_rate_in_an_open_loop():
    assert make_plan(None, None, 5.0, 1.0) == make_plan("8", None, 5.0, 1.0) == Plan(duration_s=5.0)
    opened = make_plan(None, "3", 5.0, 1.0)
    assert (opened.loop, opened.levels) == ("open", (3,))
    ramp = make_plan("1..16", None, 5.0, 1.0)
    assert (ramp.levels, ramp.is_ramp) == ((1, 16), True)
    with pytest.raises(ValueError, match="--users and --rate"):
        make_plan("8", "3", 5.0, 1.0)


def test_steps_divide_the_time_and_a_ramp_rises_linearly():
    steps = Plan(levels=(2.0, 4.0, 8.0), duration_s=9.0)
    assert [level_at(steps, at) for at in (-1, 0, 2.9, 3, 6, 9)] == [2, 2, 2, 4, 8, 8]
    assert [(p.start_s, p.end_s, p.level) for p in phases(steps)] == [
        (0, 3, 2),
        (3, 6, 4),
        (6, 9, 8),
    ]
    ramp = Plan(levels=(0.0, 8.0), is_ramp=True, duration_s=8.0)
    assert [level_at(ramp, at) for at in (-1, 0, 2, 8, 9)] == [0, 0, 2, 8, 8]
    assert [p.level for p in phases(ramp)] == [0.5 + n for n in range(8)]


def test_arrivals_are_a_poisson_process():
    """Gaps of a Poisson process are exponential, so their standard deviation equals their mean."""
    plan = Plan(loop="open", levels=(50.0,), duration_s=100.0)
    at_s = list(arrivals(plan, random.Random(1)))
    assert at_s == list(arrivals(plan, random.Random(1)))
    gaps = [after - before for before, after in pairwise(at_s)]
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert pstdev(gaps) == pytest.approx(fmean(gaps), rel=0.05)
    assert -1 <= at_s[0] < 0
    assert 99 < at_s[-1] < 100
