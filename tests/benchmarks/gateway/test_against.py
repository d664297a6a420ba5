"""Two checkouts are measured alternately; ratios are of adjacent measurements."""

from pathlib import Path

from rich.table import Table

from benchmarks.gateway.against import run_against, to_table
from benchmarks.gateway.client import Result
from benchmarks.gateway.server import write_fleet_figures
from benchmarks.gateway.tables import ROLES, Body, Cell, Samples
from deploy.capacity import read_figures

ROOT = Path(__file__).parents[3]


def test_two_checkouts_are_measured_alternately():
    [table] = run_against(ROOT, seconds=0.1, rounds=1, connections=[1], num_turns=2)
    ratios = ratios_of(table)
    assert len(ratios) == 2
    assert all(0.1 < ratio < 10 for ratio in ratios)  # of a checkout and itself


def test_a_ratio_is_the_median_of_adjacent_measurements():
    ours, theirs = samples(0.002, 0.004, 0.009), samples(0.001, 0.004, 0.006)
    assert ratio_of(ours, theirs) == 1.5  # of 2, 1 and 1.5


def ratio_of(ours: Samples, theirs: Samples) -> float:
    [ratio] = ratios_of(to_table({CELL: [(ours, theirs)]}))
    return ratio


def ratios_of(table: Table) -> list[float]:
    return [float(str(text)) for text in table.columns[4].cells]


CELL = Cell(Body("text", []), False, 1)


def samples(*p50s: float) -> Samples:
    results = [Result(1, 1, 1.0, p50_s=p50_s) for p50_s in p50s]
    return Samples(results, [dict.fromkeys((*ROLES, "client"), 0.01)] * len(p50s))


def test_figures_for_a_plan_have_the_cost_of_each_process(tmp_path: Path):
    path = tmp_path / "figures.json"
    write_fleet_figures(path, seconds=0.2, rounds=1)
    found = read_figures(path).fleet
    assert found is not None
    for costs in (found.request_s, found.token_s, found.image_s):
        assert costs.keys() == set(ROLES)
    assert all(cost > 0 for cost in (*found.request_s.values(), *found.token_s.values()))
    assert found.image_bytes > 50_000
