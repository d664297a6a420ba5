"""The result of a load test: its JSON file, its statistics, and its tables.

Statistics are computed from records. In the file, `schema` is the format version and `summary` has the statistics.
"""

import io
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.load_plan import Phase, phases
from loadtest.record import LATENCIES, Latency, Objective, Plan, Record, Workload, percentile

SCHEMA = "vlm-loadtest/1"
PAGE_COLUMNS = 160
SHARES = (0.5, 0.9, 0.99)
MAX_FAULTS = 20  # maximum number of different failures that are shown


class Result(msgspec.Struct, kw_only=True):
    """One run. `machine`: the client's machine; `client_core_ratio`: the ratio of a core that the client used."""

    schema: Literal["vlm-loadtest/1"] = SCHEMA
    created_at: str
    url: str
    model: str
    machine: str
    client_core_ratio: float = 0.0
    workload: Workload
    plan: Plan
    objective: Objective
    records: list[Record]
    summary: dict[str, Any] = {}

    def save(self, path: Path) -> None:
        self.summary = to_summary(self)
        path.write_bytes(msgspec.json.encode(self) + b"\n")


class RunPeriod:
    """A period of a run: `asked` has the requests that were due in it, `answered` the responses that ended in it."""

    def __init__(self, result: Result, phase: Phase | None = None) -> None:
        """`phase`: None for the whole run."""
        self.phase = phase or Phase(0.0, result.plan.duration_s, 0.0)
        self.asked = [r for r in result.records if self._holds(r.intended_at)]
        self.answered = [r for r in result.records if not r.error and self._holds(r.ended_at)]
        self.good = [r for r in self.answered if result.objective.is_kept(r)]
        self._kept = [result.objective.is_kept(r) for r in self.asked]

    def _holds(self, at_s: float) -> bool:
        return self.phase.start_s <= at_s < self.phase.end_s

    @property
    def offered_rate(self) -> float:
        return len(self.asked) / self.phase.length_s

    @property
    def answered_rate(self) -> float:
        return len(self.answered) / self.phase.length_s

    @property
    def token_rate(self) -> float:
        """Output tokens/s of correct answers."""
        return sum(r.num_output_tokens for r in self.answered) / self.phase.length_s

    @property
    def good_rate(self) -> float:
        return len(self.good) / self.phase.length_s

    @property
    def good_ratio(self) -> float | None:
        """The ratio of requests with a correct answer within the objective; None without requests."""
        return fmean(self._kept) if self._kept else None

    def values_s(self, latency: Latency) -> list[float]:
        """All values of a latency of the requests with a correct answer."""
        return values_of([r for r in self.asked if not r.error], latency)


def kind_of(record: Record) -> str:
    return f"{record.scenario}, {'streamed' if record.is_streamed else 'whole'}"


def by_kind(records: Iterable[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[kind_of(record)].append(record)
    return dict(sorted(groups.items()))


def values_of(records: Iterable[Record], latency: Latency) -> list[float]:
    return [value for record in records for value in record.values_s(latency)]


def counted(result: Result) -> list[Record]:
    """Correct answers to requests after the warm-up."""
    return [r for r in result.records if not r.error and r.intended_at >= 0]


def failures(result: Result) -> Counter[str]:
    """Number of failures by kind and error, including the warm-up."""
    return Counter(f"{kind_of(r)}: {r.error}" for r in result.records if r.error)


def failure_ratio(result: Result) -> float:
    return failures(result).total() / len(result.records) if result.records else 1.0


def mean_stages_s(records: Iterable[Record]) -> dict[str, float]:
    measured = [record.stages_s for record in records if record.stages_s]
    names = measured[0] if measured else ()
    return {name: fmean(stages.get(name, 0.0) for stages in measured) for name in names}


def to_summary(result: Result) -> dict[str, Any]:
    """Rates, percentiles and failures. Units: seconds, and counts per second."""
    whole = RunPeriod(result)
    kinds = {
        kind: {
            "num_answers": len(records),
            "stages_s": mean_stages_s(records),
            **{
                latency: _statistics(values)
                for latency in LATENCIES
                if (values := sorted(values_of(records, latency)))
            },
        }
        for kind, records in by_kind(counted(result)).items()
    }
    return {
        **_rates(whole),
        "client_core_ratio": result.client_core_ratio,
        "failures": dict(failures(result)),
        "failure_ratio": failure_ratio(result),
        "kinds": kinds,
        "phases": [
            {**asdict(phase), **_rates(RunPeriod(result, phase))} for phase in phases(result.plan)
        ],
    }


def _rates(period: RunPeriod) -> dict[str, float | None]:
    return {
        "offered_per_s": period.offered_rate,
        "answered_per_s": period.answered_rate,
        "good_per_s": period.good_rate,
        "good_ratio": period.good_ratio,
        "output_tokens_per_s": period.token_rate,
    }


def _statistics(values: list[float]) -> dict[str, float]:
    shares = {f"p{share * 100:g}_s": percentile(values, share) for share in SHARES}
    return {"count": len(values), "mean_s": fmean(values), **shares, "max_s": max(values)}


def show(tables: Sequence[Table], page: Path | None = None) -> None:
    """Print tables, or write a page of them. Texts of a server are not parsed as markup."""
    console = Console(markup=False)
    if page is not None:
        console = Console(markup=False, record=True, file=io.StringIO(), width=PAGE_COLUMNS)
    console.print(*tables, sep="\n")
    if page is not None:
        console.save_html(str(page))


def new_table(title: str, columns: Sequence[str]) -> Table:
    """Create a table. The first column names the row; the other columns are formatted numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def in_ms(seconds: float) -> str:
    """Format seconds as milliseconds; a dash for NaN."""
    return in_number(seconds * 1000)


def in_number(value: float) -> str:
    """Format a number with at least three digits; a dash for NaN."""
    if math.isnan(value):
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


SHOWN: tuple[Latency, ...] = ("TTFT", "E2E")  # the latencies in the table of rates


def in_percent(ratio: float | None) -> str:
    """Format a ratio in percent; a dash for None."""
    return "-" if ratio is None else f"{ratio:.1%}"


def describe_load(plan: Plan) -> str:
    unit = "users" if plan.loop == "closed" else "requests/s"
    levels = (" to " if plan.is_ramp else ", ").join(f"{level:g}" for level in plan.levels)
    steps = " in turn" if len(plan.levels) > 1 and not plan.is_ramp else ""
    return f"{levels} {unit}{steps}, {plan.duration_s:g} s"


def to_latency_table(result: Result) -> Table:
    shares = [f"p{share * 100:g}" for share in SHARES]
    table = new_table("Latencies, ms", ["kind", "latency", "values", *shares])
    for kind, records in by_kind(counted(result)).items():
        for latency in LATENCIES:
            if values_s := sorted(values_of(records, latency)):
                cells = [in_ms(percentile(values_s, share)) for share in SHARES]
                table.add_row(kind, latency, f"{len(values_s):,}", *cells)
    return table


def to_rate_table(result: Result) -> Table:
    """A row for each phase, and one for the whole run."""
    title = f"Rates per second ({describe_load(result.plan)})"
    columns = ["load", "asked", "answered", "tokens", "TTFT p90", "E2E p90"]
    has_objective = bool(str(result.objective))
    columns += ["good", "share"] if has_objective else []
    table = new_table(title, columns)
    parts = [(f"{phase.level:g}", RunPeriod(result, phase)) for phase in phases(result.plan)]
    for name, period in [*(parts if len(parts) > 1 else []), ("whole run", RunPeriod(result))]:
        rates = [period.offered_rate, period.answered_rate, period.token_rate]
        delays = [percentile(period.values_s(latency), 0.9) for latency in SHOWN]
        cells = [*map(in_number, rates), *map(in_ms, delays)]
        if has_objective:
            cells += [in_number(period.good_rate), in_percent(period.good_ratio)]
        table.add_row(name, *cells)
    return table


def to_stage_table(result: Result) -> Table:
    """Mean time of each stage of the server, by kind. No rows if the server reports no stages."""
    table = new_table("Mean time of each stage, ms", ["kind", "all", "stages"])
    table.columns[-1].justify = "left"  # one cell that wraps: a column per stage would not fit
    for kind, records in by_kind(counted(result)).items():
        if found := mean_stages_s(records):
            stages = " + ".join(f"{name} {in_ms(value)}" for name, value in found.items() if value)
            table.add_row(kind, in_ms(sum(found.values())), stages)
    return table


def to_failure_table(result: Result) -> Table:
    table = new_table("Failures", ["what", "requests"])
    for fault, number in failures(result).most_common(MAX_FAULTS):
        table.add_row(fault, f"{number:,}")
    return table


def progress_words(num_answers: int, num_failures: int, latencies_s: list[float]) -> str:
    median_s = percentile(latencies_s, 0.5)
    words = f"{num_answers:,} answered, {num_failures:,} failed"
    return words if math.isnan(median_s) else f"{words}, E2E p50 {in_ms(median_s)} ms"
