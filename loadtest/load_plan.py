"""The load over time (constant, steps or a ramp), and the arrival times of an open loop.

Reads no clock. Times are seconds since the end of the warm-up, which runs at the first level.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from loadtest.record import Plan

RAMP_PHASES = 8
DEFAULT_USERS = "8"


@dataclass(frozen=True, slots=True)
class Phase:
    """A period of the run with its mean offered load."""

    start_s: float
    end_s: float
    level: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def parse_levels(text: str) -> tuple[tuple[float, ...], bool]:
    """Parse a load: `8` is constant, `2,4,8` are steps, `1..16` is a ramp. Raises: ValueError."""
    is_ramp = ".." in text
    try:
        levels = tuple(float(part) for part in text.split(".." if is_ramp else ","))
    except ValueError:
        raise ValueError(
            f"{text!r} is neither a number, nor steps 2,4,8, nor a ramp 1..16"
        ) from None
    if is_ramp and len(levels) != 2:
        raise ValueError(f"{text!r}: write a ramp as 1..16")
    if any(not 0 <= level < 1e6 for level in levels) or not any(levels):
        raise ValueError(f"{text!r}: a load must be from 0 to below a million, and not always 0")
    return levels, is_ramp


def make_plan(users: str | None, rate: str | None, duration_s: float, warmup_s: float) -> Plan:
    """Plan a closed loop of users, 8 by default, or an open loop with a rate. Raises: ValueError."""
    if users and rate:
        raise ValueError("set only one of --users and --rate")
    levels, is_ramp = parse_levels(rate or users or DEFAULT_USERS)
    loop = "open" if rate else "closed"
    return Plan(loop=loop, levels=levels, is_ramp=is_ramp, duration_s=duration_s, warmup_s=warmup_s)


def level_at(plan: Plan, at_s: float) -> float:
    share = min(1.0, max(0.0, at_s / plan.duration_s))
    if plan.is_ramp:
        first, last = plan.levels
        return first + (last - first) * share
    return plan.levels[min(int(share * len(plan.levels)), len(plan.levels) - 1)]


def phases(plan: Plan) -> list[Phase]:
    """The steps, or equal periods of a ramp."""
    number = RAMP_PHASES if plan.is_ramp else len(plan.levels)
    length_s = plan.duration_s / number
    return [
        Phase(index * length_s, (index + 1) * length_s, level_at(plan, (index + 0.5) * length_s))
        for index in range(number)
    ]


def arrivals(plan: Plan, draw: random.Random) -> Iterator[float]:
    """The arrival times of a Poisson process with the plan's rate.

    Source: thinning (Lewis and Shedler, 1979): candidates at the highest rate, each kept with probability rate / highest.
    """
    highest = max(plan.levels)
    at_s = -plan.warmup_s
    while True:
        at_s += draw.expovariate(highest)
        if at_s >= plan.duration_s:
            return
        if draw.random() * highest < level_at(plan, at_s):
            yield at_s
