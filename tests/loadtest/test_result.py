"""Rates, percentiles, objectives and failures are computed from the records; result files are read back unchanged."""

import json

import pytest
from rich.table import Table

from loadtest.load_plan import Phase
from loadtest.record import Objective, parse_objective
from loadtest.result import (
    RunPeriod,
    counted,
    failure_ratio,
    failures,
    show,
    to_failure_table,
    to_latency_table,
    to_rate_table,
)
from tests.loadtest.factories import load_result, record, result


def test_only_failures_of_the_warm_up_count():
    run = result([record(-0.5), record(0.5), record(-0.5, error="status 503: x")])
    assert len(counted(run)) == 1
    assert failures(run) == {"text, whole: status 503: x": 1}
    assert failure_ratio(run) == pytest.approx(1 / 3)
    assert failure_ratio(result([])) == 1


def test_rates_are_per_phase_and_goodput_counts_answers_within_the_objective():
    records = [record(-0.5, e2e_s=1.0), record(1), record(2, e2e_s=3.0), record(3, error="x")]
    run = result([*records, record(4.9, e2e_s=0.3), record(6)], Objective(e2e_s=1.0))
    whole = RunPeriod(run)
    assert (whole.offered_rate, whole.answered_rate) == (pytest.approx(0.5), pytest.approx(0.5))
    assert whole.token_rate == pytest.approx(2.5)
    assert (whole.good_rate, whole.good_ratio) == (pytest.approx(0.4), pytest.approx(3 / 5))
    first, second = (RunPeriod(run, Phase(start, start + 5, 1)) for start in (0, 5))
    assert (first.offered_rate, first.answered_rate) == (pytest.approx(4 / 5), pytest.approx(2 / 5))
    assert (second.offered_rate, second.answered_rate) == (pytest.approx(0.2), pytest.approx(0.6))


@pytest.mark.parametrize(
    ("objective", "changes", "is_kept"),
    [
        ("ttft=200", {"ttft_s": 0.21}, False),
        ("ttft=200", {"ttft_s": 0.15, "waited_s": 0.1}, True),
        ("tpot=100", {"ttft_s": 0.1, "e2e_s": 0.5}, True),
        ("tpot=100", {"ttft_s": 0.1, "e2e_s": 0.6}, False),
        ("ttft=200, e2e=500", {"e2e_s": 0.6}, False),
        ("ttft=200", {"e2e_s": 9.0}, True),
        ("ttft=200,tpot=100", {"e2e_s": 0.59}, True),
        ("ttft=200,tpot=100", {"e2e_s": 0.61}, False),
        ("", {"e2e_s": 9.0}, True),
        ("", {"error": "status 503"}, False),
    ],
)
def test_objectives_compare_latencies_in_milliseconds(objective, changes, is_kept):
    assert parse_objective(objective).is_kept(record(**changes)) == is_kept


@pytest.mark.parametrize("text", ["ttft", "ttft=x", "itl=5", "ttft=0", "e2e=nan"])
def test_impossible_objective_is_refused(text):
    with pytest.raises(ValueError):
        parse_objective(text)


def test_page_escapes_errors_of_the_server(tmp_path):
    table = to_failure_table(result([record(error="</pre><script>[bold]")] * 3))
    show([table], page := tmp_path / "page.html")
    written = page.read_text()
    assert "&lt;/pre&gt;&lt;script&gt;[bold]" in written
    assert "<script" not in written


def test_file_is_read_back_unchanged(tmp_path):
    path = tmp_path / "run.json"
    run = result([record(ttft_s=0.05, itl_s=[0.01, 0.02]), record(error="x")], levels=(1.0, 2.0))
    run.save(path)
    assert load_result(path) == run
    summary = json.loads(path.read_text())["summary"]
    assert summary["kinds"]["text, streamed"]["ITL"]["p50_s"] == pytest.approx(0.01)
    assert summary["failures"] == {"text, whole: x": 1}
    assert [phase["level"] for phase in summary["phases"]] == [1.0, 2.0]


def test_tables_have_a_row_for_each_kind_and_phase():
    records = [record(0.1 * n, e2e_s=0.001 * n) for n in range(1, 101)]
    run = result([*records, record(1, ttft_s=0.05)], Objective(e2e_s=0.05), levels=(1.0, 2.0))
    rows = rows_of(to_latency_table(run))
    assert rows[-1] == ["text, whole", "E2E", "100", "50.0", "90.0", "99.0"]
    assert [row[:2] for row in rows[:-1]] == [
        ["text, streamed", name] for name in ("TTFT", "TPOT", "E2E")
    ]
    rates = rows_of(to_rate_table(run))
    assert [row[0] for row in rates] == ["1", "2", "whole run"]
    assert rates[0][-1] == "98.0%"
    assert "good" not in [column.header for column in to_rate_table(result(records)).columns]


def rows_of(table: Table) -> list[list[str]]:
    columns = ([str(cell) for cell in column.cells] for column in table.columns)
    return [list(row) for row in zip(*columns, strict=True)]
