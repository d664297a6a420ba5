"""The benchmark runs the real way and the bare endpoint, says what each costs, and counts no wrong answer."""

import io
import subprocess
import sys

import psutil
import pytest
from rich.console import Console

from benchmarks.gateway.client import Result
from benchmarks.gateway.run import measure
from benchmarks.gateway.tables import (
    BARE,
    FLEET,
    Body,
    Cell,
    Samples,
    to_cpu_table,
    to_tables,
)  # fmt: skip
from tests.waiting import wait_for

#: CPU time per request, fleet to bare endpoint: three times what it is on a quiet machine. Rates depend on other work.
MAX_CPU_RATIO = 24


def samples(rate: float) -> Samples:
    result = Result(num_requests=round(rate), num_all=round(rate), seconds=1.0, p50_s=0.001)
    roles = ("bare", "gateway", "worker", "redis-server", "client")
    return Samples([result], [dict.fromkeys(roles, 0.05)])


@pytest.fixture(scope="module")
def measured():
    return measure(seconds=0.1, rounds=1, connections=[8])


def test_a_request_costs_not_many_times_the_cpu_of_bare_fastapi(measured):
    cells = {cell for cell, _ in measured}
    assert len(cells) == 6
    for cell in cells:
        bare = measured[cell, BARE].cpu_of("bare")
        fleet = sum(
            measured[cell, FLEET].cpu_of(role) for role in ("gateway", "worker", "redis-server")
        )
        assert fleet < MAX_CPU_RATIO * bare, cell


def test_tables_fit_a_terminal_of_80_columns_and_a_pipe():
    cell = Cell(Body("text", []), True, 32)
    measured = {(cell, BARE): samples(1234), (cell, FLEET): samples(987.6)}
    for table in (*to_tables(measured), to_cpu_table(measured)):
        out = io.StringIO()
        Console(file=out, width=80).print(table)
        assert "\u2026" not in out.getvalue()
        for column in table.columns[1:]:
            assert all(str(cell) in out.getvalue() for cell in column.cells)


def test_a_benchmark_that_is_stopped_stops_its_servers():
    command = [sys.executable, "-m", "vlm", "bench", "gateway", "--seconds", "30"]
    bench = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def started() -> list[psutil.Process]:
        servers = bench.children(recursive=True)
        return servers if any(each.name() == "redis-server" for each in servers) else []

    servers = wait_for(started)
    bench.terminate()
    assert bench.wait(30) == 143
    assert not psutil.wait_procs(servers, timeout=10)[1]
