"""Trace context and the stages of a span, without OpenTelemetry, which is an optional extra.

Units: instants are epoch nanoseconds, durations seconds. Source: W3C Trace Context, section 3.2 (`traceparent`).
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NS = 1_000_000_000
_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)

#: Outcomes that are not failures.
NOT_FAILURES = ("ok", "followed", "cancelled")

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a request. `begin_s`: since the start of its span."""

    name: str
    begin_s: float
    duration_s: float
    attributes: Attributes = field(default_factory=dict)


def epoch_ns(elapsed_s: float) -> int:
    """The instant `elapsed_s` ago."""
    return time.time_ns() - round(elapsed_s * NS)  # noqa: TID251


def lay_out(durations: Sequence[tuple[str, float, Attributes]]) -> list[Stage]:
    """Consecutive stages, without empty ones."""
    stages: list[Stage] = []
    begin_s = 0.0
    for name, duration_s, attributes in durations:
        if duration_s > 0:
            stages.append(Stage(name, begin_s, duration_s, attributes))
        begin_s += duration_s
    return stages


def parse_trace_parent(header: bytes) -> str | None:
    """Normalize a header to version 00; None if it is malformed and must be ignored."""
    found = _PARENT.fullmatch(header)
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    is_known = version != b"ff" and not (version == b"00" and more)
    if not (is_known and trace_id.strip(b"0") and span_id.strip(b"0")):
        return None
    return b"-".join((b"00", trace_id, span_id, flags)).decode()


def trace_id_of(trace_parent: str) -> str:
    return trace_parent[3:35]
