"""Only what chance does not explain is called a change."""

import random

import pytest
from typer.testing import CliRunner

import vlm
from loadtest.difference import Change, compare, differing_orders
from loadtest.objective import Objective
from loadtest.record import Record
from loadtest.result import Result
from tests.loadtest.factories import record, result

LEAST = 0.05


def run_of(factor: float = 1.0, seed: int = 0, number: int = 400, **plan) -> Result:
    """A run whose latencies are lognormal and, in the middle of each second, twice as long for all."""
    draw = random.Random(seed)
    records: list[Record] = []
    for index in range(number):
        at = 10 * index / number
        slow = 2.0 if at % 1 > 0.5 else 1.0
        records.append(record(at, e2e_s=factor * slow * 0.1 * draw.lognormvariate(0, 0.3)))
    return result(records, **plan)


def verdicts(before: Result, after: Result) -> dict[str, str]:
    return {change.name: change.verdict(LEAST) for change in compare(before, after)}


def test_two_runs_of_the_same_are_the_same():
    found = [verdicts(run_of(seed=2 * n), run_of(seed=2 * n + 1)) for n in range(4)]
    assert all(set(one.values()) == {"same"} for one in found), found


def test_change_beyond_chance_is_seen_in_its_direction():
    slower = verdicts(run_of(seed=1), run_of(1.5, seed=2))
    assert slower["text, whole, E2E p50"] == slower["text, whole, E2E p90"] == "worse"
    faster = verdicts(run_of(1.5, seed=1), run_of(seed=2))
    assert faster["text, whole, E2E p50"] == "better"
    assert faster["answered/s"] == "same"


def test_rate_is_better_when_it_is_higher():
    found = verdicts(run_of(number=300), run_of(number=600))
    assert (found["answered/s"], found["tokens/s"]) == ("better", "better")


@pytest.mark.parametrize(
    ("low", "high", "after", "verdict"),
    [
        (1.1, 1.3, 1.2, "worse"),
        (0.7, 0.9, 0.8, "better"),
        (0.9, 1.3, 1.2, "same"),
        (1.01, 1.03, 1.02, "same"),
    ],
)
def test_verdict_wants_both_chance_excluded_and_a_size(low, high, after, verdict):
    assert Change("x", 1.0, after, low, high).verdict(LEAST) == verdict


def test_kinds_that_one_run_lacks_or_hardly_has_are_left_out():
    few = result([record(n / 10, ttft_s=0.05) for n in range(19)])
    assert {name.split(",")[0] for name in verdicts(few, few)} == {
        "answered/s",
        "good/s",
        "tokens/s",
    }


def test_percentile_with_a_handful_of_values_beyond_it_is_left_out():
    names = list(verdicts(run_of(number=100), run_of(number=100)))
    assert names[3:] == ["text, whole, E2E p50", "text, whole, E2E p90"]


def test_nothing_answered_is_no_change():
    assert set(verdicts(result([]), result([])).values()) == {"same"}


def test_different_tests_are_named():
    assert differing_orders(run_of(), run_of()) == []
    other = run_of(duration_s=20.0)
    other.objective = Objective(e2e_s=1.0)
    assert differing_orders(run_of(), other) == [
        "plan.duration_s: 10.0 and 20.0",
        "objective.e2e_s: None and 1.0",
    ]


def test_command_shows_what_changed_and_fails_when_asked_to(tmp_path):
    before, after = tmp_path / "a.json", tmp_path / "b.json"
    run_of(seed=1).save(before)
    run_of(1.5, seed=2, levels=(9.0,)).save(after)
    files = [str(before), str(after)]
    done = CliRunner().invoke(vlm.app, ["loadtest", "compare", *files, "--markdown"])
    assert done.exit_code == 0
    assert "| text, whole, E2E p50 |" in done.stdout
    assert "2 worse, 3 same" in done.stdout
    assert "not the same test: plan.levels" in done.stderr
    strict = CliRunner().invoke(vlm.app, ["loadtest", "compare", *files, "--fail-if-worse"])
    assert strict.exit_code == 1


def test_file_that_is_no_result_is_one_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("{}")
    for command in (["compare", str(path), str(path)], ["report", str(path), str(tmp_path / "p")]):
        done = CliRunner().invoke(vlm.app, ["loadtest", *command])
        assert done.exit_code == 1
        assert "a.json" in done.stderr
