"""Errors that the operator has to fix end a worker with exit code 78 and one line."""

import logging
import os
import socket

import pytest

import worker.main
from engines.base import EngineStartError
from engines.packages.resolve import ModelUnavailable
from engines.registry import create_engine
from engines.torch_backend.kv_cache import KVCacheTooSmall
from engines.torch_backend.loading.load import choose_device
from engines.torch_backend.loading.weights import ModelTooLarge
from engines.torch_backend.models.config import UnsupportedCheckpoint
from shared.settings.tree import EngineValues, RedisSettings, Settings, WorkerSettings


def make_settings(**worker_settings) -> Settings:
    return Settings(
        _env_file=None,  # type: ignore[call-arg]
        engine=EngineValues(kind="mock"),
        redis=RedisSettings(url="unix:///nowhere"),
        worker=WorkerSettings(**worker_settings),
    )


@pytest.mark.parametrize(
    "kind", [ModelUnavailable, UnsupportedCheckpoint, ModelTooLarge, KVCacheTooSmall]
)
def test_an_engine_that_cannot_be_made_as_asked(kind, monkeypatch, caplog):
    def fail(*arguments):
        raise kind("what is wrong and what to do")

    monkeypatch.setattr(worker.main, "create_engine", fail)
    with caplog.at_level(logging.CRITICAL):
        assert worker.main.run_worker(make_settings()) == os.EX_CONFIG
    [record] = caplog.records
    assert record.getMessage() == "what is wrong and what to do"
    assert record.exc_info is None


def test_a_port_for_probes_that_is_taken(caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with caplog.at_level(logging.CRITICAL):
            code = worker.main.run_worker(make_settings(health_port=port))
    assert code == os.EX_CONFIG
    assert "VLM_WORKER__HEALTH_PORT" in caplog.text
    assert str(port) in caplog.text


def test_progress_is_told_in_steps_of_ten_percent(caplog):
    caplog.set_level(logging.INFO)
    tell = worker.main.ProgressLog()
    for number in range(301):
        tell("load", number / 300)
    tell("check", 1.0)
    told = [record.getMessage() for record in caplog.records]
    assert told == [*(f"load {percent} %" for percent in range(0, 101, 10)), "check 100 %"]


@pytest.mark.parametrize("device", ["cuda:99", "banana", "meta"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(EngineStartError, match=device):
        choose_device(device)


def test_an_engine_whose_packages_are_not_installed(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "engines.torch_backend.loading.load", None)
    with pytest.raises(EngineStartError, match=r"vlm-fleet\[torch\]"):
        create_engine({"kind": "torch"})
