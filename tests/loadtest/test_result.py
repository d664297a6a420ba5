"""Rates, percentiles and failures are those of the records; a file comes back as it was written."""

import json

import pytest
from rich.table import Table

from loadtest.load_plan import Phase
from loadtest.record import LATENCIES, Objective
from loadtest.result import (
    Sight,
    counted,
    failure_ratio,
    failures,
    mean_stages_s,
    to_latency_table,
    to_rate_table,
)
from tests.loadtest.factories import load_result, record, result


def test_latencies_begin_when_the_request_was_meant_to_be_sent():
    late = record(1.0, e2e_s=1.5, waited_s=0.5, ttft_s=0.7)
    assert late.waited_s == pytest.approx(0.5)
    assert late.ttft_s == pytest.approx(0.7)
    assert late.tpot_s == pytest.approx(0.8 / 4)
    assert late.e2e_s == pytest.approx(1.5)


def test_one_token_has_no_time_per_further_token():
    assert record(ttft_s=0.1, num_output_tokens=1).tpot_s is None
    measured = {latency: record().values_s(latency) for latency in LATENCIES}
    assert measured == {"TTFT": [], "TPOT": [], "ITL": [], "E2E": [pytest.approx(0.1)]}


def test_warm_up_counts_for_nothing_but_failures():
    run = result([record(-0.5), record(0.5), record(-0.5, error="status 503: x")])
    assert len(counted(run)) == 1
    assert failures(run) == {"text, whole: status 503: x": 1}
    assert failure_ratio(run) == pytest.approx(1 / 3)
    assert failure_ratio(result([])) == 1


def test_rates_are_of_what_happened_within_the_time():
    records = [record(-0.5, e2e_s=1.0), record(1), record(2, error="x"), record(9.9, e2e_s=0.5)]
    sight = Sight(result(records))
    assert sight.offered_rate == pytest.approx(3 / 10)
    assert sight.answered_rate == pytest.approx(2 / 10)
    assert sight.token_rate == pytest.approx(10 / 10)


def test_goodput_leaves_out_what_was_slow_or_wrong():
    records = [record(1), record(2, e2e_s=3.0), record(3, error="x"), record(4)]
    sight = Sight(result(records, Objective(e2e_s=1.0)))
    assert sight.good_rate == pytest.approx(2 / 10)
    assert sight.good_ratio == pytest.approx(2 / 4)


def test_phase_has_its_own_requests_and_answers():
    run = result([record(1), record(4.9, e2e_s=0.3), record(6)])
    first, second = (Sight(run, Phase(start, start + 5, 1)) for start in (0, 5))
    assert (first.offered_rate, first.answered_rate) == (pytest.approx(2 / 5), pytest.approx(1 / 5))
    assert (second.offered_rate, second.answered_rate) == (pytest.approx(0.2), pytest.approx(0.4))


def test_stages_are_means_of_those_that_tell_them():
    records = [record(stages_s={"queue": 0.1}), record(stages_s={"queue": 0.3}), record()]
    assert mean_stages_s(records) == {"queue": pytest.approx(0.2)}
    assert mean_stages_s([record()]) == {}


def test_file_comes_back_as_it_was_written(tmp_path):
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
