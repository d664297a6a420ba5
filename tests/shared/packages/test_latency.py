"""Times in buckets: quantiles to a tenth, of the last minutes alone."""

import random

import pytest

from shared.packages.latency import GROWTH, WINDOW_S, RecentCounts, quantile


@pytest.mark.parametrize("share", [0.5, 0.95, 1.0])
def test_a_quantile_is_known_to_a_tenth(share: float):
    rng, counts = random.Random(1), RecentCounts(0.0)
    times = [rng.lognormvariate(-3, 1.5) for _ in range(1000)]
    for each in times:
        counts.add(each, 1.0)
    exact = sorted(times)[round(share * len(times)) - 1]
    assert exact * 0.999 <= quantile(counts.read(1.0), share) <= exact * GROWTH * 1.001


def test_what_is_too_short_to_tell_or_not_there_has_a_place():
    counts = RecentCounts(0.0)
    assert quantile(counts.read(0.0), 0.95) == 0
    counts.add(0.0, 0.0)
    assert 0 < quantile(counts.read(0.0), 0.95) < 0.001


def test_old_times_count_no_more():
    counts = RecentCounts(0.0)
    counts.add(1.0, 0.0)
    counts.add(2.0, WINDOW_S + 1)
    assert sum(counts.read(WINDOW_S + 1).values()) == 2
    assert sum(counts.read(2 * WINDOW_S + 2).values()) == 1
    counts.add(3.0, 9 * WINDOW_S)
    assert sum(counts.read(9 * WINDOW_S).values()) == 1
