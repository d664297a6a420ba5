"""Errors that the operator must fix end a worker with exit code 78 and one line."""

import logging
import os
import socket

import pytest

import worker.main
from engines.base import EngineStartError
from engines.torch_backend.loading.load import choose_device
from tests.worker.node.test_resources import make_settings


def test_a_port_for_probes_that_is_in_use(caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = make_settings(kind="mock").changed(worker={"health_port": port})
        with caplog.at_level(logging.CRITICAL):
            code = worker.main.run_worker(settings)
    assert code == os.EX_CONFIG
    assert "VLM_WORKER__HEALTH_PORT" in caplog.text
    assert str(port) in caplog.text


@pytest.mark.parametrize("device", ["cuda:99", "banana", "meta"])
def test_a_missing_device(device):
    with pytest.raises(EngineStartError, match=device):
        choose_device(device)
