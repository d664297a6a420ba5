"""A warm process becomes a worker with the environment that it receives, or ends with its node."""

import os

import pytest

from worker.node.standby import Standby


@pytest.fixture
async def standby():
    standby = Standby()
    yield standby
    await standby.keep(None)


async def test_a_warm_process_becomes_a_worker_with_the_given_environment(standby):
    await standby.keep("mock")
    warm = standby.take()
    assert warm is not None
    assert standby.take() is None
    told = {**os.environ, "VLM_LOGS__LEVEL": "info", "VLM_ENGINE__KIND": "mock", "VLM_NO_SUCH": "1"}
    process = await warm.become(told)
    _, said = await process.communicate()
    assert process.returncode == os.EX_CONFIG  # the received setting is refused
    assert b"VLM_NO_SUCH" in said


async def test_an_unneeded_warm_process_is_stopped_and_an_ended_one_is_replaced(standby):
    await standby.keep("mock")
    first = standby.take()
    assert first is not None
    await first.stop()
    assert not first.is_alive
    await standby.keep("mock")
    await standby.keep("mock")
    await standby.keep(None)
    assert standby.take() is None
