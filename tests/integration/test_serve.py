"""`vlm serve` as a newcomer meets it: real processes, the printed curl, Ctrl-C, and a hard death."""

import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent.parent
SAMPLE = ROOT / "engines" / "shapes" / "samples" / "shapes.png"
START_WITHIN_S = 60


class Served:
    """A running `vlm serve` and what its screen says."""

    def __init__(self, process: subprocess.Popen[str], screen: str) -> None:
        self.process = process
        self.screen = screen
        self.url = re.findall(r"http://127\.0\.0\.1:\d+", screen)[0]

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, command: str) -> psutil.Process:
        [found] = [p for p in self.family() if command in p.cmdline()]
        return found


def start(data_dir: Path, *arguments: str) -> Served:
    process = subprocess.Popen(
        [sys.executable, "-m", "vlm", "serve", "--engine", "mock", "--port", "0",
         "--data-dir", str(data_dir), *arguments],
        cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "Ctrl-C" in line:
            return Served(process, "".join(lines))
    raise AssertionError("vlm serve ended early:\n" + "".join(lines))


def run_vlm(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vlm", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60, **options,
    )  # fmt: skip


def end(served: Served) -> None:
    family = served.family() if served.process.poll() is None else []
    served.process.kill()
    served.process.wait()
    for process in family:
        if process.is_running():
            process.kill()


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    fleet = start(tmp_path_factory.mktemp("serve"))
    yield fleet
    end(fleet)


@pytest.fixture
def fresh(tmp_path) -> Iterator[Served]:
    fleet = start(tmp_path)
    yield fleet
    end(fleet)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_printed_curl_answers_when_pasted(served):
    command = served.screen[served.screen.index("curl ") : served.screen.index("\nEOF")] + "\nEOF\n"
    answer = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert '"finish_reason":"' in answer.stdout.replace(" ", "")


def test_chat_streams_an_answer_and_ends_with_its_stage_timings(served):
    done = run_vlm("chat", "--url", served.url, "--image", str(SAMPLE), "what is this?")
    assert done.returncode == 0, done.stderr
    answer, timings = done.stdout.strip().rsplit("\n", 1)
    assert answer.strip()
    for stage in ("ingest", "image_decode", "queue", "preprocess", "vision", "prefill", "decode"):
        assert stage in timings
    assert "tokens" in timings


def test_chat_remembers_the_picture_in_follow_up_questions(served):
    done = run_vlm("chat", "--url", served.url, "--image", str(SAMPLE), input="first\nsecond\n\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" tokens") == 2


def test_chat_without_a_server_says_how_to_start_one():
    done = run_vlm("chat", "--url", "http://127.0.0.1:9", "hello")
    assert done.returncode == 1
    assert "vlm serve" in done.stderr


def test_a_port_in_use_is_one_clear_line(served):
    port = served.url.rsplit(":", 1)[1]
    done = run_vlm("serve", "--engine", "mock", "--port", port)
    assert done.returncode == 1
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_help_shows_every_option_with_its_default():
    text = " ".join(run_vlm("serve", "--help", env={"COLUMNS": "200", "PATH": ""}).stdout.split())
    for option, default in {
        "--host": "127.0.0.1", "--port": "8000", "--workers": "1", "--engine": "torch",
        "--model": "shapes", "--dtype": "auto", "--quantization": "none",
    }.items():  # fmt: skip
        assert re.search(rf"{option}\b.*?\[default: {re.escape(default)}\]", text), option


def test_ctrl_c_stops_every_process(fresh):
    family = fresh.family()
    assert len(family) >= 3  # Redis, worker, gateway
    fresh.process.send_signal(signal.SIGINT)
    assert fresh.process.wait(timeout=30) == 0
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_no_orphan_outlives_a_killed_parent(fresh):
    family = fresh.family()
    fresh.process.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive


def test_a_killed_worker_is_replaced_and_requests_go_on(fresh):
    worker = fresh.child("worker")
    worker.kill()
    done = run_vlm("chat", "--url", fresh.url, "are you there?")
    assert done.returncode == 0, done.stderr
    assert fresh.child("worker").pid != worker.pid
