"""The gateway benchmark measures the fleet and a bare endpoint, reports their costs, and rejects wrong answers."""

import io
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from benchmarks.gateway.client import Result
from benchmarks.gateway.run import (
    BARE,
    FLEET,
    INSTANT,
    ROLES,
    Cell,
    Target,
    cpu_per_request,
    create_cells,
    measure,
    run_vlm_fleet,
    to_tables,
)
from benchmarks.gateway.server import write_fleet_figures
from deploy.capacity import read_figures
from tests.waiting import wait_for

#: CPU time per request, fleet to bare endpoint: three times that of a quiet machine. Rates depend on other processes.
MAX_CPU_RATIO = 24
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def one_fleet() -> Iterator[None]:
    """Starts the fleet of this checkout with default settings only once."""
    with run_vlm_fleet() as fleet, pytest.MonkeyPatch.context() as patch:

        def run(
            settings: Mapping[str, str] = INSTANT, folder: Path | None = None
        ) -> AbstractContextManager[Target]:
            is_usual = settings is INSTANT and folder is None
            return nullcontext(fleet) if is_usual else run_vlm_fleet(settings, folder)

        for module in ("run", "server"):
            patch.setattr(f"benchmarks.gateway.{module}.run_vlm_fleet", run)
        yield


def results(*p50s: float) -> list[Result]:
    return [Result([p50_s], 0.001, 1, 0, dict.fromkeys(ROLES, 0.05)) for p50_s in p50s]


@pytest.mark.usefixtures("one_fleet")
def test_a_request_costs_not_many_times_the_cpu_of_bare_fastapi():
    measured = measure(create_cells([8]), seconds=0.1, num_turns=1)
    assert len(measured) == 6
    for cell, found in measured.items():
        bare, fleet = (sum(cpu_per_request(found[name]).values()) for name in (BARE, FLEET))
        assert fleet < MAX_CPU_RATIO * bare, cell


@pytest.mark.usefixtures("one_fleet")
def test_two_checkouts_are_measured_alternately():
    measured = measure(create_cells([1])[:2], 0.1, num_turns=2, folder=ROOT)
    assert len(measured) == 2
    for found in measured.values():
        one, two = (min(min(each.latencies_s) for each in turns) for turns in found.values())
        assert 0.1 < two / one < 10  # of one checkout and itself


def test_tables_fit_a_terminal_of_80_columns_and_a_pipe():
    ours, theirs = results(0.002, 0.004, 0.009), results(0.001, 0.004, 0.006)
    cell = Cell("text, streamed", [], True, 32)
    [table] = to_tables({cell: {BARE: theirs, FLEET: ours}})
    assert list(table.columns[5].cells) == ["", "1.500\n1.00-2.00"]  # pairs in order: 2, 1 and 1.5
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    assert "\u2026" not in out.getvalue()
    for column in table.columns[1:]:
        assert all(line in out.getvalue() for cell in column.cells for line in str(cell).split())


@pytest.mark.usefixtures("one_fleet")
def test_figures_for_a_plan_have_the_cost_of_each_process(tmp_path: Path):
    path = tmp_path / "figures.json"
    write_fleet_figures(path, seconds=0.2, rounds=1)
    found = read_figures(path).fleet
    assert found is not None
    for costs in (found.request_s, found.token_s, found.image_s):
        assert costs.keys() == set(ROLES)
    assert all(cost > 0 for cost in (*found.request_s.values(), *found.token_s.values()))
    assert found.image_bytes > 50_000


def test_a_benchmark_that_is_stopped_stops_its_servers():
    command = [sys.executable, "-m", "vlm", "bench", "gateway", "--seconds", "30"]
    bench = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def started() -> list[psutil.Process]:
        servers = bench.children(recursive=True)
        return servers if any(each.name() == "redis-server" for each in servers) else []

    servers = wait_for(started)
    bench.terminate()
    assert bench.wait(60) == 143
    assert not psutil.wait_procs(servers, timeout=60)[1]
