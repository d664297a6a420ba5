"""Each Ray actor requests the GPUs that its worker uses. `tests/faults/test_ray_long.py` uses a real cluster."""

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.worker.node.test_resources import make_settings
from worker.node.ray_workers import RayWorkers, num_gpus


@pytest.mark.parametrize(
    ("engine", "num_there", "expected"),
    [
        ({"kind": "vllm", "tensor_parallel": 4}, 8.0, 4),
        ({"kind": "vllm", "tensor_parallel": 4}, 0.0, 4),  # a node with GPUs can join
        ({"kind": "sglang", "tensor_parallel": 2, "url": "http://gpu:30000"}, 8.0, 0),
        ({"kind": "torch"}, 8.0, 1),
        ({"kind": "torch", "device": "cpu"}, 8.0, 0),
        ({"kind": "mock"}, 8.0, 0),
    ],
)
def test_an_actor_requests_its_gpus(engine: dict[str, Any], num_there: float, expected: float):
    assert num_gpus(make_settings(**engine), num_there) == expected


async def test_workers_that_end_early_do_not_prevent_others_from_draining():
    def start(*_: Any) -> SimpleNamespace:
        async def drain() -> None:
            drained.append(ended)
            ended.set()
            await asyncio.sleep(0.02)  # until the worker ends

        ended = asyncio.Event()
        calls = {"__ray_ready__": lambda: asyncio.sleep(0), "wait": ended.wait, "drain": drain}
        return SimpleNamespace(**{key: SimpleNamespace(remote=calls[key]) for key in calls})

    drained, ray = list[asyncio.Event](), MagicMock()
    ray.exceptions.RayError = ConnectionError
    ray.cluster_resources.return_value = {}
    ray.remote.return_value.options.return_value.remote = start
    running = asyncio.create_task(RayWorkers(ray, make_settings(kind="mock"), 3).run())
    await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 10)
    assert len(drained) == 3
