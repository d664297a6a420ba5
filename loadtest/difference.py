"""What changed between two runs, and whether that is more than chance.

Called by `vlm loadtest compare`. Requests that follow each other share their fortune, so that a run counts as
some stretches of time and not as thousands of independent requests: the noise of a ratio is what comes of
drawing stretches anew, the same of both runs, many times. What a machine does differently from one hour to the
next is not in it.
"""

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from loadtest.html_report import write_page
from loadtest.load_plan import Phase
from loadtest.record import LATENCIES, Latency, Record
from loadtest.report import Table, in_ms, in_number, percentile, show
from loadtest.result import (
    Result,
    Sight,
    by_kind,
    counted,
    failure_ratio,
    load_result,
    sights,
    values_of,
)
from loadtest.result_tables import SHARES, in_percent

NUM_BLOCKS = 20
NUM_DRAWS = 300
MAX_VALUES = 2000  # of a latency; more are thinned
MIN_VALUES = 20
MIN_ABOVE = 5  # of the values beyond a percentile; a handful is chance
CONFIDENCE = 0.99

#: Values of one run, by stretch of time.
Blocks = list[list[float]]


@dataclass(frozen=True, slots=True)
class Change:
    """A number of both runs, and the range in which 99 of 100 redrawn ratios lie. Latencies are seconds."""

    name: str
    before: float
    after: float
    low: float
    high: float
    is_latency: bool = True

    @property
    def ratio(self) -> float:
        """After by before."""
        return self.after / self.before if self.before else math.nan

    def verdict(self, least: float) -> str:
        """`better`, `worse` or `same`: beyond chance, and by the share `least` at least."""
        is_beyond = self.low > 1 or self.high < 1
        if not is_beyond or abs(self.ratio - 1) < least:
            return "same"
        return "better" if (self.ratio < 1) == self.is_latency else "worse"


def compare(before: Result, after: Result) -> list[Change]:
    """The rates, and each latency of each kind that both runs have often enough."""
    rates: dict[str, Callable[[Sight], float]] = {
        "answered/s": lambda sight: sight.answered_rate,
        "good/s": lambda sight: sight.good_rate,
        "tokens/s": lambda sight: sight.token_rate,
    }
    parts = [sights(run, stretches(run)) for run in (before, after)]
    wholes = [Sight(run) for run in (before, after)]
    found = [rate_change(name, rate, parts, wholes) for name, rate in rates.items()]
    kinds = [by_kind(counted(run)) for run in (before, after)]
    for kind in sorted(kinds[0].keys() & kinds[1].keys()):
        for latency in LATENCIES:
            first = to_blocks(before, kinds[0][kind], latency)
            second = to_blocks(after, kinds[1][kind], latency)
            if min(sum(map(len, first)), sum(map(len, second))) >= MIN_VALUES:
                found += latency_changes(f"{kind}, {latency}", first, second)
    return found


def rate_change(
    name: str, rate: Callable[[Sight], float], parts: list[list[Sight]], wholes: list[Sight]
) -> Change:
    """A rate of two runs: of each as a whole, and its noise from its stretches of time."""
    first, second = ([[rate(part)] for part in run] for run in parts)
    before, after = map(rate, wholes)
    return change(name, first, second, sum, before, after, is_latency=False)


def stretches(result: Result) -> list[Phase]:
    """The run in NUM_BLOCKS parts."""
    length_s = result.plan.duration_s / NUM_BLOCKS
    return [Phase(n * length_s, (n + 1) * length_s, 0.0) for n in range(NUM_BLOCKS)]


def to_blocks(result: Result, records: Sequence[Record], latency: Latency) -> Blocks:
    """The values of one latency by stretch, thinned where they are very many."""
    groups: list[list[Record]] = [[] for _ in range(NUM_BLOCKS)]
    for record in records:
        share = record.intended_at / result.plan.duration_s
        groups[min(NUM_BLOCKS - 1, int(share * NUM_BLOCKS))].append(record)
    blocks = [values_of(group, latency) for group in groups]
    step = sum(map(len, blocks)) // MAX_VALUES + 1
    return [block[::step] for block in blocks]


def latency_changes(name: str, first: Blocks, second: Blocks) -> list[Change]:
    """Each percentile of one latency that has enough values beyond it in both runs."""
    found = []
    fewest = min(sum(map(len, blocks)) for blocks in (first, second))
    for share in SHARES:
        if fewest * (1 - share) < MIN_ABOVE:
            continue
        before, after = (percentile(gather(blocks), share) for blocks in (first, second))
        label = f"{name} p{share * 100:g}"
        found.append(
            change(label, first, second, lambda v, share=share: percentile(v, share), before, after)
        )
    return found


def change(
    name: str,
    first: Blocks,
    second: Blocks,
    measure: Callable[[list[float]], float],
    before: float,
    after: float,
    is_latency: bool = True,
) -> Change:
    """The change of one number and its noise: 1 to 1 wherever nothing can be said."""
    draw, ratios = random.Random(name), []
    for _ in range(NUM_DRAWS):
        indices = draw.choices(range(NUM_BLOCKS), k=NUM_BLOCKS)
        was, is_now = (measure(gather([blocks[n] for n in indices])) for blocks in (first, second))
        if was > 0 and is_now >= 0:
            ratios.append(is_now / was)
    rest = (1 - CONFIDENCE) / 2
    low, high = (percentile(ratios, share) if ratios else 1.0 for share in (rest, 1 - rest))
    return Change(name, before, after, low, high, is_latency)


def gather(blocks: Blocks) -> list[float]:
    """All values, ordered, so that ordering them again costs little."""
    return sorted(chain.from_iterable(blocks))


def differing_orders(before: Result, after: Result) -> list[str]:
    """What was not the same about the tests themselves."""
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


def to_change_table(changes: Sequence[Change], least: float, is_whole: bool) -> Table:
    """The rates and what changed; with `is_whole` the rest too."""
    columns = ["number", "before", "after", "ratio", "by chance", "verdict"]
    table = Table("Latencies in ms; ratio = after / before", columns)
    for item in changes:
        verdict = item.verdict(least)
        if is_whole or verdict != "same" or not item.is_latency:
            write = in_ms if item.is_latency else in_number
            chance = f"{item.low:.2f} to {item.high:.2f}"
            values = write(item.before), write(item.after)
            table.add(item.name, *values, f"{item.ratio:.2f}", chance, verdict)
    return table


def to_sentence(changes: Sequence[Change], least: float, before: Result, after: Result) -> str:
    """The whole in a few words."""
    verdicts = [item.verdict(least) for item in changes]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("better", "worse", "same"))
    failed = [in_percent(failure_ratio(run)) for run in (before, after)]
    return f"{counts} (beyond chance, by {least:.0%} at least); failed {failed[0]} and {failed[1]}"


def run(
    before: Path,
    after: Path,
    least: float,
    is_whole: bool,
    fail_if_worse: bool,
    markdown: bool,
    page: Path | None = None,
) -> int:
    """Show what changed; returns the exit code. Raises: ResultError."""
    first, second = load_result(before), load_result(after)
    for line in differing_orders(first, second):
        print(f"not the same test: {line}", file=sys.stderr)
    changes = compare(first, second)
    show([to_change_table(changes, least, is_whole)], markdown)
    if page:
        table = to_change_table(changes, least, is_whole=True)
        write_page({"before": first, "after": second}, page, table)
    print(to_sentence(changes, least, first, second))
    is_worse = any(item.verdict(least) == "worse" for item in changes)
    return int(fail_if_worse and is_worse)
