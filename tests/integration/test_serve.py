"""`vlm serve` for a new user: real processes, the printed curl command, Ctrl-C, and kills."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil
import pytest
from redis import Redis

from tests.factories_queue import wait_until_written
from tests.integration.fleet_process import ROOT, SAMPLE, Served, is_ready, run_vlm, start_fleet
from tests.processes import environment_of
from tests.waiting import wait_for

REDIS_BYTES = 64 * 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("killed")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Served]:
    """Its processes are killed one after another; the last test stops it."""
    with start_fleet(
        folder, "--log-level", "info",
        VLM_REDIS__MAX_MEMORY_BYTES=str(REDIS_BYTES),
        VLM_ENGINE__MOCK__DECODE_S="0.04",  # slow enough to see an answer grow
        XDG_STATE_HOME="/proc/nothing",  # an unwritable home directory
    ) as fleet:  # fmt: skip
        yield fleet


def test_chat_streams_an_answer(fleet):
    command = [sys.executable, "-m", "vlm", "chat", "--url", fleet.url, "--image", str(SAMPLE)]
    with subprocess.Popen([*command, "what is this?"], cwd=ROOT, stdout=subprocess.PIPE) as chat:
        assert chat.stdout is not None
        first = os.read(chat.stdout.fileno(), 1000)
        with fleet.client() as client:  # the request is still open
            assert "\nvlm_open_requests 1.0\n" in client.get("/metrics").text
        answer = first + chat.stdout.read()
    assert chat.returncode == 0
    assert answer.strip()


def test_a_port_in_use_is_one_clear_line(fleet):
    port = fleet.url.rsplit(":", 1)[1]
    done = run_vlm("serve", "--engine", "mock", "--port", port)
    assert done.returncode == os.EX_CONFIG
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_killed_worker_is_replaced_and_requests_continue(fleet):
    worker = fleet.child("worker")
    worker.kill()
    done = run_vlm("chat", "--url", fleet.url, "--model", "mock", "are you there?")  # can wait
    assert done.returncode == 0, done.stderr
    assert fleet.child("worker").pid != worker.pid


def test_a_killed_redis_is_restarted_and_streams_continue(fleet, folder):
    """P4 within a node: acknowledged writes are in the file of Redis."""
    body = {
        "model": "mock", "stream": True, "max_tokens": 150, "seed": 7, "ignore_eos": True,
        "messages": [{"role": "user", "content": "a long story"}],
    }  # fmt: skip
    redis = fleet.redis()
    with fleet.client() as client:
        undisturbed = text_of(client.post("/v1/chat/completions", json=body).text.splitlines())
        with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            seen = [next(lines) for _ in range(20)]
            with Redis(unix_socket_path=str(folder / "redis.sock")) as connection:
                wait_until_written(connection)
                with fleet.client() as other:  # the request is still open and waits for Redis
                    assert "\nvlm_open_requests 1.0\n" in other.get("/metrics").text
            redis.kill()
            seen += lines
        assert text_of(seen) == undisturbed
        short = body | {"stream": False, "max_tokens": 5}
        assert client.post("/v1/chat/completions", json=short).is_success
    assert fleet.redis().pid != redis.pid
    with Redis(unix_socket_path=str(folder / "redis.sock")) as connection:
        assert connection.config_get("maxmemory") == {"maxmemory": str(REDIS_BYTES)}


def test_a_killed_gateway_is_restarted_on_its_port(fleet):
    gateway = fleet.child("gateway")
    gateway.kill()
    gateway.wait(timeout=60)
    wait_for(lambda: is_ready(fleet.url))
    done = run_vlm("chat", "--url", fleet.url, "--model", "mock", "are you there?")
    assert done.returncode == 0, done.stderr
    assert fleet.child("gateway").pid != gateway.pid


def test_ctrl_c_stops_every_process(fleet):
    family = fleet.family()
    assert len(family) >= 3  # Redis, worker, gateway
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.process.wait(timeout=60) == 0
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_startup_progress_is_printed_every_few_seconds(tmp_path):
    """Without a terminal, while the worker waits for a server that does not exist."""
    often = "import vlm, worker.node.serve; worker.node.serve.PROGRESS_S = 1.0; vlm.main()"
    engine = ["--engine", "openai", "--url", "http://127.0.0.1:9", "--model", "none"]
    with subprocess.Popen(
        [sys.executable, "-c", often, "serve", *engine, "--port", "0", "--data-dir", str(tmp_path)],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        assert process.stderr.readline() == "starting the openai engine on 1 worker(s) ...\n"
        shown = re.compile(r"starting for (\d+) s, 0 of 1 model\(s\) ready\n")
        lines = (shown.fullmatch(line) for line in process.stderr)
        first, second = islice((int(line[1]) for line in lines if line), 2)
        process.send_signal(signal.SIGINT)
        process.stderr.read()
    assert 1 <= first < second


def text_of(lines: list[str]) -> str:
    """Returns the text of a complete stream of chunks."""
    assert [line for line in lines if line][-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_with_only_a_root_key_each_process_has_only_its_own_secrets(tmp_path):
    (tmp_path / "vlm.yaml").write_text("gateway: {root_key: key-of-the-file}\n")
    shared = {"OTEL_SERVICE_NAME": "mine", "CUDA_VISIBLE_DEVICES": "0", "PATH": os.environ["PATH"]}
    key, own = "key-of-the-environment", {"VLM_WORKER__ID": "named", "HF_TOKEN": "token-of-the-hub"}
    with start_fleet(
        tmp_path / "data", **shared, **own, VLM_CONFIG=str(tmp_path / "vlm.yaml"),
        VLM_GATEWAY__ROOT_KEY=key, OPENAI_API_KEY=key, API_KEY=key,
    ) as fleet:  # fmt: skip
        assert f"{fleet.url}/admin" in fleet.screen
        assert "$API_KEY" in fleet.curl
        with fleet.client() as client:
            assert client.get("/v1/models").status_code == 401
            headers = {"authorization": f"Bearer {key}"}
            status = client.get("/v1/admin/status", headers=headers).json()
        assert [each["num_workers"] for each in status["models"]] == [1]
        worker, gateway = (environment_of(fleet.child(name)) for name in ("worker", "gateway"))
        assert not any("key-of" in value for value in worker.values())
        assert not any(name.startswith("VLM_GATEWAY") or name == "VLM_CONFIG" for name in worker)
        assert worker.items() >= (own | shared).items()
        assert not any("token-of" in value for value in gateway.values())
        assert not any(name.startswith(("VLM_WORKER", "VLM_ENGINE")) for name in gateway)
        assert gateway.items() >= {"VLM_GATEWAY__ROOT_KEY": key, **shared}.items()
        family = fleet.family()
        assert len(family) >= 3  # Redis, worker, gateway
        fleet.process.kill()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive, "an orphan"
