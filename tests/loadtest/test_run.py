"""The command `vlm loadtest`: every kind of question, both loops, result files and exit codes."""

import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from click.testing import Result as Done
from typer.testing import CliRunner

import vlm
from loadtest.record import Objective, Order, Plan, Target, Workload
from loadtest.result import Result, RunPeriod, by_kind, counted
from loadtest.run import LoadTestError, drive, run
from loadtest.scenarios import PROFILES
from tests.loadtest.factories import load_result, record, result
from tests.loadtest.fake_server import FakeServer, stream
from tests.rounds import in_one_round

NOTHING = Order(target=Target(url="", model=""), workload=Workload(), plan=Plan())


def load(fake: FakeServer, *arguments: str) -> Done:
    short = ["--duration", "0.6", "--warmup", "0", "--max-tokens", "3", "--image-bytes", "2000"]
    host = fake.url.removeprefix("http://")
    return CliRunner().invoke(vlm.app, ["loadtest", "--host", host, *short, *arguments])


def result_of(fake: FakeServer, tmp_path: Path, *arguments: str) -> tuple[Result, Done]:
    """Runs text requests without failures; returns the result."""
    path = tmp_path / "a.json"
    done = load(fake, "--profile", "text", "--json", str(path), *arguments)
    assert done.exit_code == 0, done.stderr
    return load_result(path), done


@in_one_round
def test_every_kind_is_asked_in_a_closed_loop_and_reported(fake, tmp_path):
    fake.pieces = stream(pause_s=0.003)
    path, page = tmp_path / "a.json", tmp_path / "a.html"
    files = ["--json", str(path), "--html", str(page)]
    done = load(fake, "--users", "5", "--api-key", "sk-secret", *files)
    assert done.exit_code == 0, done.stderr
    result = load_result(path)
    kinds = set(by_kind(counted(result)))
    assert kinds == {
        f"{name}, {way}" for name in PROFILES["mixed"] for way in ("streamed", "whole")
    }
    assert all(kind.partition(",")[0] in done.stdout for kind in kinds)
    assert max(open_at_once(result)) <= 5
    assert 0 < result.client_core_ratio < 1.1
    assert result.workload == Workload(max_tokens=3, image_bytes=2000)
    assert all(f"{name}, streamed" in page.read_text() for name in PROFILES["mixed"])
    assert "sk-secret" not in path.read_text() + page.read_text()


def open_at_once(result: Result) -> list[int]:
    """Returns the number of open requests at the time when each one was sent."""
    records = result.records
    return [sum(r.sent_at <= one.sent_at < r.ended_at for r in records) for one in records]


@in_one_round
def test_open_loop_does_not_wait_and_hides_no_waiting(fake, tmp_path):
    """A server that responds after half a second gets all requests that arrive meanwhile."""
    fake.pause_s = 0.5
    result, _ = result_of(fake, tmp_path, "--rate", "40", "--stream-ratio", "0")
    assert result.plan == Plan(loop="open", levels=(40.0,), duration_s=0.6, warmup_s=0.0)
    assert max(open_at_once(result)) > 10
    assert 20 < RunPeriod(result).offered_rate < 70
    assert all(record.e2e_s >= 0.5 for record in result.records)
    assert all(record.waited_s >= 0 for record in result.records)


def test_wrong_and_broken_answers_are_failures(fake):
    """The fake server's words are not those of the mock engine, and its streams have no end."""
    fake.pieces = []
    done = load(
        fake, "--users", "2", "--model", "mock", "--profile", "text", "--think-time", "0.02"
    )
    assert done.exit_code == 1
    assert "x text, streamed: the stream ended without [DONE]" in done.stderr
    assert "x text, whole: the answer is wrong" in done.stderr
    assert "no request was answered" in done.stderr


@pytest.mark.parametrize(("num_failed", "limit", "code"), [(1, 0.1, 0), (2, 0.1, 1), (10, 1.0, 1)])
def test_failures_above_the_limit_fail_the_run_and_a_busy_client_warns(
    monkeypatch, capsys, num_failed, limit, code
):
    made = result([record(error="x" * (number < num_failed)) for number in range(10)])
    made.client_core_ratio = 0.95 if code else 0.5
    monkeypatch.setattr("loadtest.run.make_load", lambda *wanted: made)
    assert run(NOTHING, Objective(), limit) == code
    assert ("it may be the bottleneck" in capsys.readouterr().err) == bool(code)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (find_spec, ("http://127.0.0.1:9", "ConnectionRefusedError")),
        (lambda name: None, ("pip install '.[loadtest]'",)),
    ],
    ids=["no server", "no locust"],
)
def test_a_missing_server_or_package_is_a_one_line_error(monkeypatch, spec, says):
    monkeypatch.setattr("loadtest.run.find_spec", spec)
    done = CliRunner().invoke(vlm.app, ["loadtest", "--host", "http://127.0.0.1:9"])
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert all(word in done.stderr for word in says)


SAYS = "import sys; sys.stdin.read(); say = lambda *lines: print(*lines, sep='\\n', flush=True)\n"
LINE = msgspec.json.encode(record()).decode()


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (f"say({LINE!r}, 'warning: <stray>', *[{LINE!r}] * 5000, '0.5')", "not a record: warning: <stray>"),
        ("sys.exit('it broke')", "it broke"),
    ],
)  # fmt: skip
def test_failed_driver_ends_the_test_with_its_message(monkeypatch, code, message):
    monkeypatch.setattr("loadtest.run.DRIVER", [sys.executable, "-c", SAYS + code])
    target = Target(url="http://127.0.0.1:9", model="mock")
    with pytest.raises(LoadTestError, match=message):
        drive(Order(target=target, workload=Workload(), plan=Plan()))


@in_one_round
def test_request_without_an_answer_at_the_end_is_a_failure(fake, tmp_path):
    """Each word arrives within the timeout for silence, but the last one after the total timeout."""
    fake.pieces = stream(pause_s=0.2)
    path = tmp_path / "a.json"
    open_loop = ["--rate", "20", "--profile", "text", "--stream-ratio", "1", "--timeout", "0.3"]
    done = load(fake, *open_loop, "--json", str(path))
    assert done.exit_code == 1
    errors = [record.error for record in load_result(path).records]
    assert set(errors) == {"", "no answer before the end of the run"}
    assert all(not record.error or record.sent_at > 0.2 for record in load_result(path).records)
