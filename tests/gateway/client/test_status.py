"""`vlm status`: its arithmetic, and what it shows of a running fleet."""

import io
import math
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from contextlib import suppress
from functools import partial

import pytest
from rich.console import Console

from gateway.client.status import Period, Snapshot, parse_metrics, to_screen
from tests.factories_images import data_url
from tests.integration.fleet_process import ROOT, Served, run_vlm, start_fleet

TTFT = "vlm_time_to_first_token_seconds"


def snapshot(at: float, answers: int, refused: int = 0, late: int = 0) -> Snapshot:
    """A gateway after so many answers in 0.1 s each, and `late` ones beyond the last bucket."""
    text = f"""
# TYPE vlm_requests_total counter
vlm_requests_total{{model="m",outcome="ok"}} {answers}
vlm_requests_total{{model="m",outcome="rejected"}} {refused}
# TYPE {TTFT} histogram
{TTFT}_bucket{{model="m",le="0.1"}} 0
{TTFT}_bucket{{model="m",le="0.2"}} {answers}
{TTFT}_bucket{{model="m",le="+Inf"}} {answers + late}
{TTFT}_sum{{model="m"}} {answers * 0.15}
{TTFT}_count{{model="m"}} {answers}
# TYPE vlm_request_stage_seconds histogram
vlm_request_stage_seconds_bucket{{stage="queue",model="m",le="+Inf"}} {answers}
vlm_request_stage_seconds_sum{{stage="queue",model="m"}} {answers * 0.03}
vlm_request_stage_seconds_count{{stage="queue",model="m"}} {answers}
vlm_request_stage_seconds_bucket{{stage="decode",model="m",le="+Inf"}} {answers}
vlm_request_stage_seconds_sum{{stage="decode",model="m"}} {answers * 0.09}
vlm_request_stage_seconds_count{{stage="decode",model="m"}} {answers}
# TYPE vlm_queue_depth gauge
vlm_queue_depth{{model="m"}} 7
"""
    return Snapshot(at, "ready", [{"id": "m", "num_workers": 2}], parse_metrics(text))


def shown(period: Period) -> list[str]:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(to_screen("http://gateway", period))
    return [" ".join(line.split()) for line in console.export_text().splitlines()]


def test_counts_since_the_start_and_rates_of_a_period():
    assert "m 2 7 10 4 0" in shown(Period(None, snapshot(5, 10, 4)))
    assert "m 2 7 5.0 0.2 0.0" in shown(Period(snapshot(5, 10, 4), snapshot(9, 30, 5)))


def test_latencies_fit_a_terminal():
    lines = shown(Period(None, snapshot(5, 10)))
    assert "model TTFT p50 TTFT p95 TPOT p50 TPOT p95 E2E p50 E2E p95" in lines
    assert "m 150.0 ms 195.0 ms - - - -" in lines


def test_stages_are_means_and_shares_in_their_order():
    lines = shown(Period(None, snapshot(5, 10)))
    assert lines[-2:] == ["queue 30.0 ms 25% ██████", "decode 90.0 ms 75% ██████████████████"]


@pytest.mark.parametrize(("ratio", "expected"), [(0.5, 0.15), (0.8, 0.18), (0.99, 0.2)])
def test_quantiles_are_interpolated_and_end_at_the_last_bound(ratio, expected):
    late = 0 if ratio < 0.9 else 10
    period = Period(None, snapshot(0, 100, late=late))
    assert period.quantile(ratio, TTFT, model="m") == pytest.approx(expected)


def test_nothing_happened_is_no_number():
    period = Period(snapshot(0, 10), snapshot(2, 10))
    assert math.isnan(period.quantile(0.5, TTFT, model="m"))
    assert math.isnan(period.mean(TTFT))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    fleet = start_fleet(tmp_path_factory.mktemp("status"), VLM_GATEWAY__API_KEYS="sk-one")
    yield fleet
    fleet.end()


def ask(fleet: Served) -> None:
    content = [{"type": "image_url", "image_url": {"url": data_url()}}]
    body = {"model": "mock", "max_tokens": 8, "messages": [{"role": "user", "content": content}]}
    key = {"authorization": "Bearer sk-one"}
    with fleet.client() as client:
        assert client.post("/v1/chat/completions", json=body, headers=key).is_success


def test_a_running_fleet_is_shown_to_who_has_a_key(fleet):
    ask(fleet)
    done = run_vlm("status", "--url", fleet.url, "--api-key", "sk-one")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][:3] == [fleet.url, "is", "ready,"]
    assert ["mock", "1", "0", "1", "0", "8"] in [line[:6] for line in lines]
    stages = [line[0] for line in lines if line][-8:]
    assert (stages[0], stages[-1]) == ("ingest", "relay")


def test_what_is_wrong_is_one_line(fleet):
    for arguments, words in (
        (["--url", fleet.url], "API key"),
        (["--url", "http://127.0.0.1:9"], "nothing"),
    ):
        done = run_vlm("status", *arguments)
        assert done.returncode == 1
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_it_is_shown_anew_with_rates_until_ctrl_c(fleet):
    """In a terminal of its own, as what goes to a file is written once."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (50, 100))
    arguments = ["status", "--watch", "--pause", "0.3", "--url", fleet.url, "--api-key", "sk-one"]
    watching = subprocess.Popen(
        [sys.executable, "-m", "vlm", *arguments],
        cwd=ROOT,
        stdout=its,
        # what runs in the background is started with Ctrl-C ignored
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    os.close(its)
    try:
        read_until(ours, r"since its start")
        ask(fleet)
        row = read_until(
            ours, r"(?s)the last \d\.\d s.*?mock +1 +0 +(\d+\.\d) +0\.0 +([1-9]\d*\.\d)"
        )
        assert float(row[2]) == pytest.approx(8 * float(row[1]), rel=0.2)
        watching.send_signal(signal.SIGINT)
        read_to_end(ours)
        assert watching.wait(timeout=30) == 0
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)


def read_to_end(terminal: int) -> None:
    """Until nobody writes any more: a terminal that nobody reads holds up who writes."""
    with suppress(OSError):  # Linux says EIO at the end
        while os.read(terminal, 65536):
            pass


def read_until(terminal: int, pattern: str) -> re.Match[str]:
    """What matches of all that a terminal has shown, from now on, without its control sequences."""
    shown = ""
    while not (found := re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))):
        shown += os.read(terminal, 65536).decode(errors="ignore")
    return found
