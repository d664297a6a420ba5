"""Load-test results with defaults, for tests of what is computed from them."""

from pathlib import Path
from typing import Any

import msgspec

from loadtest.record import Objective, Plan, Record, Workload
from loadtest.result import Result


def record(at: float = 0.0, e2e_s: float = 0.1, **changes: Any) -> Record:
    """Returns a complete answer. `waited_s` is the delay of the sending; `ttft_s` makes it a stream."""
    waited_s, ttft_s = changes.pop("waited_s", 0.0), changes.pop("ttft_s", None)
    made = Record(
        scenario="text",
        intended_at=at,
        sent_at=at + waited_s,
        ended_at=at + e2e_s,
        num_output_tokens=5,
        num_prompt_tokens=7,
    )
    if ttft_s is not None:
        made.is_streamed, made.first_text_at = True, at + ttft_s
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def result(
    records: list[Record], objective: Objective | None = None, model: str = "mock", **plan: Any
) -> Result:
    """Returns a run of 10 s with these records."""
    return Result(
        created_at="2026-11-21T00:00:00+00:00",
        url="http://127.0.0.1:8000",
        model=model,
        machine="2 cores",
        workload=Workload(),
        plan=Plan(**{"duration_s": 10.0, **plan}),
        objective=objective or Objective(),
        records=records,
    )


def load_result(path: Path) -> Result:
    return msgspec.json.decode(path.read_bytes(), type=Result)
