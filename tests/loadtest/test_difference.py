"""`vlm loadtest compare` prints two runs next to each other."""

from typer.testing import CliRunner

import vlm
from loadtest.difference import differing_orders, to_table
from loadtest.record import Objective
from loadtest.result import Result
from tests.loadtest.factories import record, result


def run_of(factor: float = 1.0, **plan) -> Result:
    records = [record(index / 40, e2e_s=factor * 0.1 * (1 + index / 400)) for index in range(400)]
    return result(records, **plan)


def test_rates_and_latencies_of_both_runs_have_their_ratio():
    rows = {row[0]: row[1:] for row in to_table(run_of(), run_of(1.5)).rows}
    assert rows["tokens/s"][2] == "0.99"
    assert rows["text, whole, E2E p50"] == ["150", "225", "1.50"]


def test_kinds_that_one_run_lacks_are_left_out():
    streamed = result([record(n / 10, ttft_s=0.05) for n in range(19)])
    names = [row[0] for row in to_table(run_of(), streamed).rows]
    assert names == ["answered/s", "good/s", "tokens/s"]


def test_runs_without_answers_can_be_compared():
    assert [row[3] for row in to_table(result([]), result([])).rows] == ["-"] * 3


def test_different_tests_are_named():
    assert differing_orders(run_of(), run_of()) == []
    other = run_of(duration_s=20.0)
    other.objective = Objective(e2e_s=1.0)
    assert differing_orders(run_of(), other) == [
        "plan.duration_s: 10.0 and 20.0",
        "objective.e2e_s: None and 1.0",
    ]


def test_the_command_prints_a_table_and_the_differing_settings(tmp_path):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    run_of().save(before)
    run_of(1.5, levels=(9.0,)).save(after)
    files = [str(before), str(after)]
    done = CliRunner().invoke(vlm.app, ["loadtest", "compare", *files])
    assert done.exit_code == 0
    assert "text, whole, E2E p50" in done.stdout
    assert "plan.levels" in done.stderr


def test_a_file_that_is_not_a_result_is_named_in_one_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("{}")
    for command in (["compare", str(path), str(path)], ["report", str(path), str(tmp_path / "p")]):
        done = CliRunner().invoke(vlm.app, ["loadtest", *command])
        assert done.exit_code == 1
        assert "a.json" in done.stderr
