"""`python -m loadtest.run` as a command: Locust users against a server, one table, an honest exit code."""

import subprocess
import sys

import pytest

from loadtest.fleet import ROOT
from loadtest.run import Result, read_errors, read_samples, to_table


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loadtest.run", "--seconds", "3", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_every_scenario_is_asked_and_measured(fake):
    done = run("--url", fake.url, "--users", "3", "--markdown")
    assert done.returncode == 0, done.stderr
    cells = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()]
    rows = {(row[1], row[2]) for row in cells if len(row) > 3}
    for kind in ("text", "picture", "repeated picture"):
        assert (f"{kind}, whole", "E2E") in rows
        assert (f"{kind}, whole", "TTFT") not in rows
        assert {(f"{kind}, streamed", metric) for metric in ("TTFT", "ITL", "E2E")} <= rows
    assert ("all", "") in rows
    assert "0 errors" in done.stdout


def test_one_kind_of_fault_fails_the_run_and_is_named(fake):
    fake.pieces = []
    done = run("--url", fake.url, "--users", "1")
    assert done.returncode == 1
    assert "the stream ended without [DONE]" in done.stderr


def test_server_that_is_not_there_fails_the_run():
    done = run("--url", "http://127.0.0.1:9", "--users", "1", "--seconds", "1")
    assert done.returncode == 1
    assert "connection: ConnectionRefusedError" in done.stderr


@pytest.mark.parametrize("url", ["http://example.com", "http://10.0.0.1:8000", "127.0.0.1:8000"])
def test_other_machines_are_never_loaded(url):
    done = run("--url", url)
    assert done.returncode == 2
    assert "only servers on this machine" in done.stderr


def test_samples_of_one_scenario_are_gathered(tmp_path):
    path = tmp_path / "samples"
    path.write_text('["a", "E2E", [1.0]]\n["a", "E2E", [2.0, 3.0]]\n["b", "ITL", [4.0]]\n')
    assert read_samples(path) == {"a": {"E2E": [1.0, 2.0, 3.0]}, "b": {"ITL": [4.0]}}
    assert read_samples(tmp_path / "none") == read_errors(tmp_path / "none") == {}


def test_table_has_rates_and_percentiles():
    values_s = {"text, whole": {"E2E": [0.001 * ms for ms in range(1, 101)], "TTFT": [], "ITL": []}}
    table = to_table(Result(0, 10.0, values_s, {"x": 2}), num_users=4)
    assert table.rows[0] == ["text, whole", "E2E", "10.0", "100", "50.0", "95.0", "99.0"]
    assert table.rows[1][:4] == ["all", "", "10.0", "100"]
    assert "2 errors" in table.title


def test_fleet_of_its_own_is_started_loaded_and_stopped():
    done = run("--users", "3")
    assert done.returncode == 0, done.stderr
    assert "0 errors" in done.stdout
