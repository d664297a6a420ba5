"""Options of the command line reach the settings of what they start."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import vlm
from shared.settings.tree import Settings

ENGINE_OPTIONS = ["--engine", "mock", "--max-num-seqs", "7", "--dtype", "float16"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What commands would have started, with its arguments."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(vlm, "start", lambda *call: calls.append(call))
    return calls


def run(*arguments: str) -> None:
    result = CliRunner().invoke(vlm.app, arguments)
    assert result.exit_code == 0, result.output


def test_serve_hands_options_of_every_group_on(started):
    run("serve", *ENGINE_OPTIONS, "--port", "0", "--allow-open", "--workers", "3")
    [(target, settings, workers, data_dir)] = started
    assert (target, workers, data_dir) == ("worker.node.serve:run_fleet", 3, None)
    assert isinstance(settings, Settings)
    assert (settings.engine.kind, settings.engine.max_num_seqs) == ("mock", 7)
    assert (settings.gateway.port, settings.gateway.allow_open) == (0, True)


def test_worker_hands_its_options_on(started):
    run("worker", *ENGINE_OPTIONS, "--redis-url", "unix:///nowhere", "--log-level", "error")
    target, settings = started[-1]
    assert target == "worker.main:run_worker"
    assert (settings.engine.dtype, settings.redis.url) == ("float16", "unix:///nowhere")
    assert settings.logs.level == "error"


def test_what_is_not_given_is_the_settings_own(started):
    run("gateway", "--redis-url", "unix:///nowhere", "--die-with-parent")
    assert started[0] == ("shared.process:die_with_parent",)
    settings = started[-1][1]
    assert settings == Settings(redis=settings.redis)


@pytest.mark.parametrize("wrong", [["--port", "zero"], ["--nothing"], ["--workers", "0"]])
def test_a_wrong_option_is_refused(wrong, started):
    result = CliRunner().invoke(vlm.app, ["serve", *wrong])
    assert result.exit_code == 2
    assert not started


def test_tools_of_the_engine_get_what_was_asked_for(monkeypatch):
    calls: list[tuple[Any, ...]] = []

    class Tool:
        BenchOptions = dict

        @staticmethod
        def run(*arguments: Any) -> None:
            calls.append(arguments)

    monkeypatch.setattr("engines.commands.import_module", lambda name: Tool)
    run("quantize", "org/name", "out", "--scheme", "int4")
    run("bench", "engine", "--batch-sizes", "1,8", "--scenarios", "decode", "--json")
    assert calls[0] == ("org/name", Path("out"), "int4")
    assert calls[1][0]["batch_sizes"] == (1, 8)
    assert calls[1][0]["scenarios"] == ("decode",)
    assert calls[1][1] is True
