"""Two runs next to each other: `vlm loadtest compare`. Ratios within the noise of the machine mean nothing."""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from loadtest.record import LATENCIES, percentile
from loadtest.report import SHARES, Table, in_ms, in_number, in_percent, show
from loadtest.result import Result, Sight, by_kind, counted, failure_ratio, load_result, values_of


def differing_orders(before: Result, after: Result) -> list[str]:
    """Settings in which the two runs differ."""
    orders = [
        {"model": run.model}
        | {
            f"{part}.{name}": value
            for part in ("workload", "plan", "objective")
            for name, value in msgspec.structs.asdict(getattr(run, part)).items()
        }
        for run in (before, after)
    ]
    return [
        f"{name}: {value} and {orders[1][name]}"
        for name, value in orders[0].items()
        if value != orders[1][name]
    ]


def to_table(before: Result, after: Result) -> Table:
    """Rates, and the percentiles of each latency of the kinds that both runs have."""
    table = Table("Latencies in ms", ["number", "before", "after", "after / before"])

    def add(name: str, first: float, second: float, write: Callable[[float], str]) -> None:
        ratio = second / first if first else math.nan
        table.add(name, write(first), write(second), in_number(ratio))

    wholes = Sight(before), Sight(after)
    rates: dict[str, Callable[[Sight], float]] = {
        "answered/s": lambda whole: whole.answered_rate,
        "good/s": lambda whole: whole.good_rate,
        "tokens/s": lambda whole: whole.token_rate,
    }
    for name, rate in rates.items():
        add(name, rate(wholes[0]), rate(wholes[1]), in_number)
    kinds = by_kind(counted(before)), by_kind(counted(after))
    for kind in sorted(kinds[0].keys() & kinds[1].keys()):
        for latency in LATENCIES:
            first, second = (sorted(values_of(found[kind], latency)) for found in kinds)
            for share in SHARES if first and second else ():
                name = f"{kind}, {latency} p{share * 100:g}"
                add(name, percentile(first, share), percentile(second, share), in_ms)
    return table


def run(before: Path, after: Path) -> int:
    """Print the comparison; returns the exit code. Raises: ResultError."""
    first, second = load_result(before), load_result(after)
    for difference in differing_orders(first, second):
        print(f"the runs differ in {difference}", file=sys.stderr)
    show([to_table(first, second)])
    failed = [in_percent(failure_ratio(result)) for result in (first, second)]
    print(f"failed requests: {failed[0]} before, {failed[1]} after")
    return 0
