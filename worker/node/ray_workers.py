"""Runs workers on a Ray cluster: Ray schedules each by its CPUs and GPUs, and this process restarts lost workers.

An actor runs one `vlm worker`, and ends with it. When the leases of a lost worker expire, other workers continue its
requests; this does not depend on Ray.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module  # noqa: TID251
from typing import Any

from shared.process import Pauses, on_stop_signal, wait_for
from shared.settings import SettingsError, first_line
from shared.settings.tree import Settings
from worker.node.environment import WORKER_GROUPS, settings_environment
from worker.node.serve import read_engine_settings
from worker.node.supervisor import describe_end, run_options

logger = logging.getLogger(__name__)

#: A worker that Ray has not placed after this long is logged.
PLACED_WITHIN_S = 10.0
_KILL_AFTER_S = 5.0
_CONNECT_WITHIN_S = 5.0


class WorkerActor:
    """One worker process on a node. It inherits the variable with which Ray assigns GPUs."""

    def __init__(self, environment: dict[str, str], command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command, "--die-with-parent", str(os.getpid())],
            env={**os.environ, **environment},
        )

    def wait(self) -> int:
        """Wait until the worker ends. Returns its exit code."""
        return self._process.wait()

    def drain(self) -> None:
        self._process.send_signal(signal.SIGTERM)


class RayWorkers:
    """Keeps `num_workers` workers running on a cluster."""

    def __init__(self, ray: Any, settings: Settings, num_workers: int) -> None:
        """Raises: SettingsError."""
        self._ray = ray
        self._settings = settings
        self._num_workers = num_workers
        gpus = num_gpus(settings, ray.cluster_resources().get("GPU", 0.0))
        self._resources = {"num_cpus": 1, "num_gpus": gpus}
        self._environment = settings_environment(settings, WORKER_GROUPS)
        self._actors: dict[int, Any] = {}
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Keep the workers running until a signal, then drain them."""
        on_stop_signal(self._stopping.set)
        keeping = [asyncio.create_task(self._keep(n)) for n in range(1, self._num_workers + 1)]
        await self._stopping.wait()
        drains = [actor.drain.remote() for actor in self._actors.values()]
        # The call of a lost actor fails.
        await asyncio.gather(*drains, return_exceptions=True)
        await asyncio.wait(keeping, timeout=self._settings.worker.drain_s + _KILL_AFTER_S)
        for task in keeping:
            task.cancel()

    async def _keep(self, number: int) -> None:
        """Restart a worker whenever it or its node is lost, with exponential backoff."""
        pauses = Pauses()
        while not self._stopping.is_set():
            pauses.started()
            end = await self._live(number)
            if self._stopping.is_set():
                break
            pause_s = pauses.next_s()
            logger.warning("worker %d %s; restarting in %.1f s", number, end, pause_s)
            await wait_for(self._stopping, pause_s)

    async def _live(self, number: int) -> str:
        """Run one worker to its end. Returns how it ended."""
        remote = self._ray.remote(WorkerActor).options(
            **self._resources, scheduling_strategy="SPREAD", max_restarts=0, max_concurrency=2
        )
        actor = self._actors[number] = remote.remote(
            self._environment, [*run_options("vlm"), "worker"]
        )
        try:
            placed = asyncio.ensure_future(actor.__ray_ready__.remote())
            while not (await asyncio.wait({placed}, timeout=PLACED_WITHIN_S))[0]:
                needs = ", ".join(f"{n:g} {what[4:]}" for what, n in self._resources.items() if n)
                logger.warning("worker %d waits for a node with %s", number, needs)
                if self._stopping.is_set():
                    return "was not placed"
            placed.result()
            return describe_end(await actor.wait.remote())
        except self._ray.exceptions.RayError as error:
            return f"was lost: {first_line(error)}"
        finally:
            self._actors.pop(number, None)
            self._ray.kill(actor)


def run_ray_workers(settings: Settings, address: str, num_workers: int) -> int:
    """Keep workers on the cluster at `address` until a signal. Returns the exit code. Raises: SettingsError."""
    try:
        ray: Any = import_module("ray")  # an optional dependency
    except ModuleNotFoundError:
        raise SettingsError("--ray needs the package 'ray': pip install '.[ray]'") from None
    _check_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise SettingsError(f"--ray {address}: {first_line(error)}") from None
    # Ray's processes import from the working directory first, so they get the class itself.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    asyncio.run(RayWorkers(ray, settings, num_workers).run())
    ray.shutdown()
    return 0


def _check_address(address: str) -> None:
    """Raises: SettingsError if nothing listens at the address. Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "//" in address or not port.isdecimal():
        return  # `auto`, or an address in Ray's own format
    try:
        socket.create_connection((host, int(port)), _CONNECT_WITHIN_S).close()
    except (OSError, OverflowError) as error:
        raise SettingsError(
            f"--ray {address}: no cluster answers there ({error}); start one by `ray start --head`"
        ) from None


def num_gpus(settings: Settings, num_there: float) -> float:
    """GPUs of a worker: `tensor_parallel`, or 1 if the cluster has GPUs and the engine can use one."""
    engine = read_engine_settings(settings)
    if getattr(engine, "url", ""):  # the server runs outside of the worker
        return 0.0
    if (sharing := getattr(engine, "tensor_parallel", 0)) > 0:
        return sharing
    starts_server = hasattr(engine, "command")
    uses_gpu = starts_server or getattr(engine, "device", "cpu") in ("auto", "cuda")
    return 1.0 if uses_gpu and num_there else 0.0
