"""The record of one request of a load test, and the parameters of the test.

The simulated users write records; the modules for results and reports read them. Latencies are defined as in
`shared/telemetry/metrics.py`, with two differences. They begin when the request was due, so that waiting for a free
client counts. E2E ends with the last received byte.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

Latency = Literal["TTFT", "TPOT", "ITL", "E2E"]
LATENCIES: tuple[Latency, ...] = get_args(Latency)
Profile = Literal["mixed", "text", "image", "repeated", "several", "conversation"]


class Record(msgspec.Struct, omit_defaults=True):
    """One request. Units: seconds; `*_at` since the end of the warm-up, negative within it."""

    scenario: str
    intended_at: float
    sent_at: float
    ended_at: float
    is_streamed: bool = False
    error: str = ""  #: empty: the answer was complete and correct
    first_text_at: float | None = None
    itl_s: list[float] = []
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    stages_s: dict[str, float] = {}

    @property
    def waited_s(self) -> float:
        """Time from the due time to the sending of the request."""
        return self.sent_at - self.intended_at

    @property
    def e2e_s(self) -> float:
        """Time from the due time to the last byte."""
        return self.ended_at - self.intended_at

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_text_at is None else self.first_text_at - self.intended_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None: not streamed, or a single token."""
        if self.first_text_at is None or self.num_output_tokens < 2:
            return None
        return (self.ended_at - self.first_text_at) / (self.num_output_tokens - 1)

    def values_s(self, latency: Latency) -> list[float]:
        """The measured values of a latency: none, one, or several for ITL."""
        if latency == "ITL":
            return self.itl_s
        value = {"E2E": self.e2e_s, "TTFT": self.ttft_s, "TPOT": self.tpot_s}[latency]
        return [] if value is None else [value]


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    profile: Profile = "mixed"
    stream_ratio: float = 0.5
    max_tokens: int = 16
    image_bytes: int = 60_000
    think_s: float = 0.0  #: mean pause of a user of the closed loop between answer and question
    seed: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Load and duration. `levels`: users of a closed loop, or requests/s of an open loop."""

    loop: Literal["closed", "open"] = "closed"
    levels: tuple[float, ...] = (8.0,)
    is_ramp: bool = False
    duration_s: float = 30.0
    warmup_s: float = 1.0


class Target(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    model: str
    timeout_s: float = 60.0
    api_key: str = ""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    target: Target
    workload: Workload
    plan: Plan


_LIMITED = ("ttft", "tpot", "e2e")


class Objective(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Latency limits. Units: seconds; None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __str__(self) -> str:
        limits = {name: getattr(self, f"{name}_s") for name in _LIMITED}
        shown = [f"{name.upper()} <= {s * 1e3:g} ms" for name, s in limits.items() if s is not None]
        return " and ".join(shown)

    def is_kept(self, record: Record) -> bool:
        """Whether an answer is correct and within the limits.

        A response that is not streamed must also arrive in the time that the limits allow a stream of the same length.
        """
        if record.error:
            return False
        limits = [(self.e2e_s, record.e2e_s)]
        if record.is_streamed:
            limits += [(self.ttft_s, record.ttft_s), (self.tpot_s, record.tpot_s)]
        elif self.ttft_s is not None and self.tpot_s is not None:
            num_gaps = max(0, record.num_output_tokens - 1)
            limits.append((self.ttft_s + self.tpot_s * num_gaps, record.e2e_s))
        return all(limit is None or value is None or value <= limit for limit, value in limits)


def parse_objective(text: str) -> Objective:
    """Parse limits in milliseconds, such as `ttft=500,tpot=50,e2e=5000`; empty: no limits. Raises: ValueError."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            limits[f"{name.strip()}_s"] = float(value) / 1e3
        except ValueError:
            raise ValueError(f"{part!r} is not a limit: use ttft=500 (milliseconds)") from None
        if name.strip() not in _LIMITED:
            raise ValueError(f"{name!r} is not a latency: use {', '.join(_LIMITED)}")
    if any(not limit > 0 for limit in limits.values()):
        raise ValueError(f"{text!r}: a limit must be above 0")
    return Objective(**limits)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0..1) of all values do not exceed; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
