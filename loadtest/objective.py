"""Service level objectives: latency limits, and which answers meet them."""

import msgspec

from loadtest.record import Record

LATENCIES = ("ttft", "tpot", "e2e")


class ObjectiveError(ValueError):
    """An invalid objective; the message says why."""


class Objective(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Latency limits. Units: seconds; None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __str__(self) -> str:
        limits = {name: getattr(self, f"{name}_s") for name in LATENCIES}
        shown = [f"{name.upper()} <= {s * 1e3:g} ms" for name, s in limits.items() if s is not None]
        return " and ".join(shown)

    def is_kept(self, record: Record) -> bool:
        """Whether an answer is correct and within the limits.

        Only E2E can be measured for a whole response: its limit is that of a stream.
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
    """`ttft=500,tpot=50,e2e=5000`, in milliseconds; empty: none. Raises: ObjectiveError."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            limits[f"{name.strip()}_s"] = float(value) / 1e3
        except ValueError:
            raise ObjectiveError(f"{part!r} is not like ttft=500 (milliseconds)") from None
        if name.strip() not in LATENCIES:
            raise ObjectiveError(f"{name!r} is none of {', '.join(LATENCIES)}")
    if any(not limit > 0 for limit in limits.values()):
        raise ObjectiveError(f"{text!r}: a limit is above 0")
    return Objective(**limits)
