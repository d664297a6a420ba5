"""The data of a trace, without OpenTelemetry, which is an optional extra.

Units: instants are epoch nanoseconds, durations seconds.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NS = 1_000_000_000

#: Outcomes of a request with which nothing is wrong.
NOT_FAILURES = ("ok", "followed", "cancelled")

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a request. `begin_s` counts from the start of the span that it belongs to."""

    name: str
    begin_s: float
    duration_s: float
    attributes: Attributes = field(default_factory=dict)


def epoch_ns(elapsed_s: float) -> int:
    """The instant that lies so long back."""
    return time.time_ns() - round(elapsed_s * NS)  # noqa: TID251


def lay_out(
    durations: Sequence[tuple[str, float, Attributes]], begin_s: float = 0.0
) -> list[Stage]:
    """Stages that follow each other, without those that took no time."""
    stages: list[Stage] = []
    for name, duration_s, attributes in durations:
        if duration_s > 0:
            stages.append(Stage(name, begin_s, duration_s, attributes))
        begin_s += duration_s
    return stages
