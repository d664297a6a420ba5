"""Errors of `vlm serve` for settings that cannot run: one sentence, immediately, with exit code 78."""

import os
import subprocess
import sys
import time

import pytest

from shared.redis.embedded import EmbeddedRedis
from tests.integration.fleet_process import ROOT, run_vlm
from tests.rounds import in_one_round

CANNOT_START = os.EX_CONFIG
WITHIN_S = 15  #: "within seconds", on a busy machine
IMPORTED = "import time:"  #: prefix of a line of Python's import times


def run_serve(tmp_path, *arguments: str, **options):
    place = ("--port", "0", "--data-dir", str(tmp_path / "redis"))
    return run_vlm("serve", *place, *arguments, **options)


def sentences(stderr: str) -> list[str]:
    """Returns the lines of the output without the animation of the start."""
    lines = (line for line in stderr.splitlines() if not line.startswith(IMPORTED))
    return [line for line in lines if line.strip() and "starting " not in line]


@in_one_round
def test_a_misspelled_model_is_one_sentence_with_what_to_do(tmp_path):
    """Immediately: the model is checked before its engine is imported."""
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--data-dir", "/proc/nothing"],
        ["--data-dir", "/proc" + "/nothing" * 20],
        [
            "--data-dir",
            "/dev/null",
            "--redis-url",
            "unix:///none",
            "--set",
            "deploy.store=file:///none",
        ],
        ["--host", "192.0.2.1", "--port", "0", "--allow-open"],
        ["--redis-url", "bla"],
        ["--host", "0.0.0.0"],
        ["--max-model-len", "1"],
    ],
)
def test_bad_options_are_named(tmp_path, arguments):
    done = run_serve(tmp_path, "--engine", "mock", *arguments)
    assert done.returncode == CANNOT_START
    option, value, *_ = arguments
    setting = {"0.0.0.0": "API_KEYS", "1": "MAX_MODEL_LEN"}.get(value)
    assert done.stderr.count(setting) == 1 if setting else option in done.stderr, done.stderr
    for word in ("Traceback", "exit code"):
        assert word not in done.stderr


@pytest.mark.parametrize("command", ["worker", "gateway"])
def test_an_unreachable_redis_is_reported_once_and_awaited(tmp_path, command):
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
