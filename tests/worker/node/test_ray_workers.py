"""Each Ray actor asks for the GPUs that its worker uses. `tests/faults/test_ray_long.py` has a real cluster."""

import asyncio
from typing import Any

import pytest

from shared.settings.tree import EngineValues, Settings
from worker.node.ray_workers import RayWorkers


class FakeRay:
    """A cluster whose actors end at once; it keeps the options of the first."""

    class exceptions:
        RayError = OSError

    def __init__(self, num_gpus: float) -> None:
        self.num_gpus, self.given = num_gpus, asyncio.Queue[dict[str, Any]]()
        self.drain = self.wait = self.__ray_ready__ = self  # methods of the actor

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0, "GPU": self.num_gpus} if self.num_gpus else {"CPU": 8.0}

    def options(self, **options: Any) -> "FakeRay":
        self.given.put_nowait(options)
        return self

    def remote(self, *arguments: Any) -> Any:
        if arguments:  # a class, or what an actor starts with
            return self
        done = asyncio.get_running_loop().create_future()
        done.set_result(0)
        return done

    def kill(self, actor: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("engine", "num_there", "expected"),
    [
        ({"kind": "vllm", "tensor_parallel": 4}, 8.0, 4),
        ({"kind": "vllm", "tensor_parallel": 4}, 0.0, 4),  # a node with GPUs may join
        ({"kind": "sglang", "tensor_parallel": 2, "url": "http://gpu:30000"}, 8.0, 0),
        ({"kind": "llama-server"}, 8.0, 1),
        ({"kind": "llama-server"}, 0.0, 0),
        ({"kind": "torch"}, 8.0, 1),
        ({"kind": "torch"}, 0.0, 0),
        ({"kind": "torch", "device": "cpu"}, 8.0, 0),
        ({"kind": "mock"}, 8.0, 0),
    ],
)
async def test_an_actor_asks_for_the_gpus_of_its_worker(
    engine: dict[str, Any], num_there: float, expected: float
):
    settings = Settings(_env_file=None, engine=EngineValues(**engine))  # type: ignore
    ray = FakeRay(num_there)
    workers = RayWorkers(ray, settings, 1)
    running = asyncio.create_task(workers.run())
    options = await asyncio.wait_for(ray.given.get(), 5.0)
    workers.stop()
    await running
    assert (options["num_gpus"], options["num_cpus"]) == (expected, 1)
