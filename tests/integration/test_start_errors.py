"""What a person sees who asks `vlm serve` for something that cannot run: one sentence, at once, exit code 78."""

import os
import subprocess
import sys
import time

import pytest

from shared.redis.embedded import EmbeddedRedis
from tests.integration.fleet_process import ROOT, run_vlm, start_fleet
from tests.processes import environment_of
from tests.rounds import in_one_round

CANNOT_START = os.EX_CONFIG
WITHIN_S = 15  #: "within seconds", of a busy machine
IMPORTED = "import time:"  #: begins a line of Python's own record of imports


def run_serve(tmp_path, *arguments: str, **options):
    place = ("--port", "0", "--data-dir", str(tmp_path / "redis"))
    return run_vlm("serve", *place, *arguments, **options)


def sentences(stderr: str) -> list[str]:
    """Lines that say something; the animation of the start is none."""
    lines = (line for line in stderr.splitlines() if not line.startswith(IMPORTED))
    return [line for line in lines if line.strip() and "starting " not in line]


@in_one_round
def test_a_misspelled_model_is_one_sentence_with_what_to_do(tmp_path):
    """At once: without what would run it."""
    started = time.monotonic()
    environment = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = run_serve(tmp_path, "--model", "typo", env=environment)
    assert time.monotonic() - started < WITHIN_S
    assert done.returncode == CANNOT_START
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith(IMPORTED)}
    assert "shared.settings.tree" in imported
    assert "torch" not in imported
    [sentence] = sentences(done.stderr)
    for word in ("typo", "shapes", "directory", "org/name"):
        assert word in sentence


def test_a_checkpoint_that_cannot_be_run_is_one_sentence(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"model_type": "unheard-of"}')
    done = run_serve(tmp_path, "--model", str(checkpoint))
    assert done.returncode == CANNOT_START
    [sentence] = sentences(done.stderr)
    assert "unheard-of" in sentence


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data-dir", "/proc/nothing"], ["/proc/nothing", "--data-dir"]),
        (["--data-dir", "/proc" + "/nothing" * 20], ["/proc" + "/nothing" * 20]),
        (["--host", "192.0.2.1", "--port", "0", "--allow-open"], ["192.0.2.1", "--host"]),
        (["--host", "192.0.2.1", "--port", "8000", "--allow-open"], ["192.0.2.1", "--host"]),
        (["--redis-url", "bla"], ["--redis-url", "redis://HOST"]),
    ],
)
def test_a_place_that_is_none_is_one_sentence_with_what_to_do(tmp_path, arguments, words):
    done = run_serve(tmp_path, "--engine", "mock", *arguments)
    assert done.returncode == CANNOT_START
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--engine", "mock", "--host", "0.0.0.0"], "API_KEYS"),
        (["--engine", "mock", "--max-model-len", "1"], "MAX_MODEL_LEN"),
    ],
)
def test_bad_settings_are_named_once(tmp_path, arguments, named):
    done = run_serve(tmp_path, *arguments)
    assert done.returncode == CANNOT_START
    assert done.stderr.count(named) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "exit code" not in done.stderr


@pytest.mark.parametrize("command", ["worker", "gateway"])
def test_a_redis_that_is_not_there_is_told_once_and_waited_for(tmp_path, command):
    redis = EmbeddedRedis(tmp_path)
    settings = ["--set", "engine.kind=mock", "--set", "gateway.port=0", "--redis-url", redis.url]
    process = subprocess.Popen(
        [sys.executable, "-m", "vlm", command, *settings],
        cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if "VLM_REDIS_URL" in line:
                break
        with redis:
            for line in process.stderr:
                said.append(line)
                if "answers again" in line:
                    break
            else:
                raise AssertionError("".join(said))
    finally:
        process.kill()
        process.communicate()
    [told] = [line for line in said if "VLM_REDIS_URL" in line]
    assert redis.url in told
    assert "is ready" not in "".join(said)


def test_each_process_has_only_its_own_secrets(tmp_path, monkeypatch):
    (tmp_path / "vlm.yaml").write_text("gateway: {api_keys: key-of-the-file}\n")
    shared = {"OTEL_SERVICE_NAME": "mine", "CUDA_VISIBLE_DEVICES": "0", "PATH": os.environ["PATH"]}
    served = start_fleet(
        tmp_path / "redis",
        **shared,
        VLM_CONFIG=str(tmp_path / "vlm.yaml"),
        VLM_GATEWAY__API_KEYS="key-of-the-environment",
        OPENAI_API_KEY="key-of-the-environment",
        API_KEY="key-of-the-environment",
        HF_TOKEN="token-of-the-hub",
        VLM_WORKER__ID="named",
        VLM_ENGINE__MOCK__NUM_OUTPUT_TOKENS="3",
    )
    try:
        worker = environment_of(served.child("worker"))
        gateway = environment_of(served.child("gateway"))
        with served.client() as client:
            assert client.get("/v1/models").status_code == 401
    finally:
        served.end()
    assert not any("key-of" in value for value in worker.values())
    assert not any(name.startswith("VLM_GATEWAY") or name == "VLM_CONFIG" for name in worker)
    assert worker["HF_TOKEN"] == "token-of-the-hub"
    assert worker["VLM_WORKER__ID"] == "named"
    assert worker["VLM_ENGINE__MOCK__NUM_OUTPUT_TOKENS"] == "3"
    assert gateway["VLM_GATEWAY__API_KEYS"] == "key-of-the-environment"
    assert not any("token-of" in value for value in gateway.values())
    assert not any(name.startswith(("VLM_WORKER", "VLM_ENGINE")) for name in gateway)
    for name, value in shared.items():
        assert worker[name] == gateway[name] == value
