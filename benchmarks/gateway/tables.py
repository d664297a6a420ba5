"""What the gateway benchmark measured, beside what it is compared to: tables and goals.

Pure arithmetic.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.gateway.client import Result
from benchmarks.tables import in_figures, in_ms, new_table

BARE = "bare FastAPI"
FLEET = "vlm-fleet"
ROLES = ("gateway", "worker", "redis-server")


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """A kind of request. `is_new`: each one shows an image that was not seen before."""

    name: str
    content: list[dict[str, Any]]
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure on both targets."""

    body: Body
    stream: bool
    num_connections: int

    @property
    def name(self) -> str:
        """The kind of request and of answer."""
        return f"{self.body.name}, {'streamed' if self.stream else 'whole'}"


@dataclass(slots=True)
class Samples:
    """The rounds of one cell on one target."""

    results: list[Result] = field(default_factory=list)
    cpu_s: list[dict[str, float]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return median(result.num_requests / result.seconds for result in self.results)

    @property
    def p50_s(self) -> float:
        return median(result.p50_s for result in self.results)

    @property
    def p99_s(self) -> float:
        """99th percentile of the latency."""
        return median(result.p99_s for result in self.results)

    @property
    def num_events(self) -> float:
        """Server-sent events of an answer: a server that is behind puts several tokens into one."""
        return median(result.num_events / max(1, result.num_all) for result in self.results)

    def cpu_of(self, role: str) -> float:
        """CPU seconds per request of one process."""
        return median(
            used[role] / max(1, result.num_all)
            for used, result in zip(self.cpu_s, self.results, strict=True)
        )


Measured = dict[tuple[Cell, str], Samples]


def pairs(measured: Measured) -> Iterator[tuple[Cell, Samples, Samples]]:
    """Each cell with the samples of the bare endpoint and of the fleet."""
    for cell in dict.fromkeys(cell for cell, _ in measured):
        yield cell, measured[cell, BARE], measured[cell, FLEET]


def to_tables(measured: Measured) -> list[Table]:
    """One table per kind of request, whole and streamed; one row per number of connections."""
    tables: dict[str, Table] = {}
    columns = ["clients", "bare req/s", "p50 ms", "p99 ms"]
    columns += ["fleet req/s", "p50 ms", "p99 ms", "ratio", "added ms", "events"]
    for cell, bare, fleet in pairs(measured):
        table = tables.setdefault(cell.name, new_table(cell.name, *columns))
        table.add_row(
            str(cell.num_connections),
            *(in_figures(bare.rate), in_ms(bare.p50_s), in_ms(bare.p99_s)),
            *(in_figures(fleet.rate), in_ms(fleet.p50_s), in_ms(fleet.p99_s)),
            f"{fleet.rate / bare.rate:.2f}",
            in_ms(fleet.p50_s - bare.p50_s),
            f"{bare.num_events:.0f}/{fleet.num_events:.0f}" if cell.stream else "-",
        )
    return list(tables.values())


def to_cpu_table(measured: Measured) -> Table:
    """What each request costs each process."""
    columns = ["request", "connections", "bare", "gateway", "worker", "Redis", "client"]
    table = new_table("CPU milliseconds per request", *columns)
    for cell, bare, fleet in pairs(measured):
        table.add_row(
            cell.name,
            str(cell.num_connections),
            in_ms(bare.cpu_of("bare")),
            *(in_ms(fleet.cpu_of(role)) for role in (*ROLES, "client")),
        )
    return table
