"""Tables of a result, for a terminal and for a page."""

import io
import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.load_plan import phases
from loadtest.record import LATENCIES, Latency, Plan, percentile
from loadtest.result import (
    Result,
    Sight,
    by_kind,
    counted,
    failures,
    mean_stages_s,
    values_of,
)

PAGE_COLUMNS = 160
MAX_FAULTS = 20  # kinds of failures that are shown


def show(tables: Sequence[Table], page: Path | None = None) -> None:
    """Print tables, or write a page of them. Texts of a server are not parsed as markup."""
    console = Console(markup=False)
    if page is not None:
        console = Console(markup=False, record=True, file=io.StringIO(), width=PAGE_COLUMNS)
    console.print(*tables, sep="\n")
    if page is not None:
        console.save_html(str(page))


def new_table(title: str, columns: Sequence[str]) -> Table:
    """A table; the first column names the row, the others are formatted numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def in_ms(seconds: float) -> str:
    """Milliseconds to three figures; a dash if it was not measured."""
    return in_number(seconds * 1000)


def in_number(value: float) -> str:
    """A number to three figures at least; a dash if it was not measured."""
    if math.isnan(value):
        return "-"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


SHARES = (0.5, 0.9, 0.99)
SHOWN: tuple[Latency, ...] = ("TTFT", "E2E")  # of a phase


def in_percent(ratio: float | None) -> str:
    """A ratio in percent; a dash if it was not measured."""
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
    title = f"Rates, a second ({describe_load(result.plan)})"
    columns = ["load", "asked", "answered", "tokens", "TTFT p90", "E2E p90"]
    has_objective = bool(str(result.objective))
    columns += ["good", "share"] if has_objective else []
    table = new_table(title, columns)
    parts = [(f"{phase.level:g}", Sight(result, phase)) for phase in phases(result.plan)]
    for name, sight in [*(parts if len(parts) > 1 else []), ("whole run", Sight(result))]:
        rates = [sight.offered_rate, sight.answered_rate, sight.token_rate]
        delays = [percentile(sight.values_s(latency), 0.9) for latency in SHOWN]
        cells = [*map(in_number, rates), *map(in_ms, delays)]
        if has_objective:
            cells += [in_number(sight.good_rate), in_percent(sight.good_ratio)]
        table.add_row(name, *cells)
    return table


def to_stage_table(result: Result) -> Table:
    """Mean time of each stage of the server, by kind; no rows if the server reports none."""
    means = {kind: mean_stages_s(records) for kind, records in by_kind(counted(result)).items()}
    names = list(dict.fromkeys(name for found in means.values() for name in found))
    table = new_table("Mean time of each stage, ms", ["kind", *names, "all"])
    for kind, found in means.items():
        if found:
            stages = [in_ms(found.get(name, 0.0)) for name in names]
            table.add_row(kind, *stages, in_ms(sum(found.values())))
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
