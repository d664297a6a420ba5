"""Latencies of a version, as counts that are added up over its workers.

A bucket is a tenth wider than the one before, so a quantile has a resolution of a tenth.
"""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping

LEAST_S = 1e-4
GROWTH = 1.1
#: Counts cover the present window and the one before.
WINDOW_S = 300.0


def bucket_of(seconds: float) -> int:
    """The first bucket whose upper bound is at least this."""
    return max(0, math.ceil(math.log(max(seconds, LEAST_S) / LEAST_S, GROWTH) - 1e-9))


def add_up(counts: Iterable[Mapping[int, int]]) -> Counter[int]:
    """Add up the counts of several workers."""
    return sum((Counter(each) for each in counts), Counter[int]())


def quantile(counts: Mapping[int, int], share: float) -> float:
    """The latency quantile in seconds; 0 without any."""
    rank, seen = share * sum(counts.values()), 0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen >= rank:
            return LEAST_S * GROWTH**bucket
    return 0.0


class RecentCounts:
    """Latencies of the last five to ten minutes, by bucket."""

    def __init__(self, now: float | None = None) -> None:
        self._began_at = time.monotonic() if now is None else now
        self._before: Counter[int] = Counter()
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, now: float | None = None) -> None:
        self._turn(now)
        self._counts[bucket_of(seconds)] += 1

    def read(self, now: float | None = None) -> dict[int, int]:
        self._turn(now)
        return dict(self._before + self._counts)

    def _turn(self, now: float | None) -> None:
        now = time.monotonic() if now is None else now
        age_s = now - self._began_at
        if age_s < WINDOW_S:
            return
        self._before = self._counts if age_s < 2 * WINDOW_S else Counter()
        self._counts, self._began_at = Counter(), now
