"""Each Ray actor asks for the GPUs that its worker uses. `tests/faults/test_ray_long.py` has a real cluster."""

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from tests.worker.node.test_resources import make_settings
from worker.node.ray_workers import RayWorkers, num_gpus


@pytest.mark.parametrize(
    ("engine", "num_there", "expected"),
    [
        ({"kind": "vllm", "tensor_parallel": 4}, 8.0, 4),
        ({"kind": "vllm", "tensor_parallel": 4}, 0.0, 4),  # a node with GPUs may join
        ({"kind": "sglang", "tensor_parallel": 2, "url": "http://gpu:30000"}, 8.0, 0),
        ({"kind": "torch"}, 8.0, 1),
        ({"kind": "torch", "device": "cpu"}, 8.0, 0),
        ({"kind": "mock"}, 8.0, 0),
    ],
)
def test_an_actor_asks_for_the_gpus_of_its_worker(
    engine: dict[str, Any], num_there: float, expected: float
):
    assert num_gpus(make_settings(**engine), num_there) == expected


class Actor:
    """An actor whose worker ends while the next one is told to drain."""

    def __init__(self, _: dict[str, str]) -> None:
        self.ended = asyncio.Event()
        self.was_told = False
        for name in ("__ray_ready__", "wait", "drain"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name.strip('_')}")))

    async def _ray_ready(self) -> None: ...

    async def _wait(self) -> int:
        await self.ended.wait()
        return 0

    async def _drain(self) -> None:
        self.was_told = True
        self.ended.set()
        await asyncio.sleep(0.02)


async def test_workers_that_end_early_do_not_keep_others_from_draining():
    actors: list[Actor] = []

    def start(environment: dict[str, str]) -> Actor:
        actors.append(Actor(environment))
        return actors[-1]

    made = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))
    ray = SimpleNamespace(
        cluster_resources=dict, remote=lambda _: made, kill=lambda _: None,
        exceptions=SimpleNamespace(RayError=ConnectionError),
    )  # fmt: skip
    running = asyncio.create_task(RayWorkers(ray, make_settings(kind="mock"), 3).run())
    await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 10)
    assert [actor.was_told for actor in actors] == [True] * 3
