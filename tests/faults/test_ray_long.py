"""Workers on a Ray cluster of three nodes; a node, or the actor of a worker with a server, is killed under load."""

import asyncio
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.make_checkpoint import make_checkpoint
from shared.queue.registry import Registry
from tests.engines.upstream.asking import read_metric
from tests.faults.fleet import Fleet, playing, run_fleet_at, tokens_seen
from tests.faults.history import FINISHED
from tests.faults.processes import PREFIX, ROOT
from tests.faults.test_upstream_long import read
from tests.long import long
from tests.waiting import until, wait_for

NUM_WORKERS = 3
NUM_STREAMS = 6
WITHIN_S = 60.0
#: A raylet waits 15 s for its agents, and a busy machine may need longer.
TRIES = 3

ray = pytest.importorskip("ray", reason="ray is not installed: make faults installs it apart")
pytestmark = long("faults")


class Cluster:
    """Nodes as processes of this machine, of one processor and one GPU by name each, so that each takes one worker."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayCluster  # noqa: PLC0415

        small = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80 << 20}
        self._cluster = RayCluster(
            initialize_head=True,
            head_node_args={**small, "num_cpus": 0, "num_gpus": 0, "include_dashboard": False},
        )
        self.address: str = self._cluster.address
        self.nodes = [self._cluster.add_node(**small, wait=False) for _ in range(NUM_WORKERS)]
        self._cluster.wait_for_nodes()

    def kill(self, node: object) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def add(self) -> None:
        self._cluster.add_node(num_cpus=1, object_store_memory=80 << 20, wait=True)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    for number in range(1, TRIES + 1):
        try:
            cluster = Cluster()
            break
        except Exception:
            if number == TRIES:
                raise
    yield cluster
    cluster.close()


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A Redis that listens on TCP."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on the PATH")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [program, "--port", str(port), "--save", "", "--dir", tmp_path], stdout=subprocess.DEVNULL
    )

    def listens() -> bool:
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_for(listens, WITHIN_S)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
async def fleet(redis_url: str) -> AsyncIterator[Fleet]:
    async with run_fleet_at(redis_url) as fleet:
        yield fleet


async def test_a_node_killed_under_load_loses_no_stream_and_its_worker_returns(fleet, cluster):
    environment = {"VLM_ENGINE__KIND": "mock", "VLM_ENGINE__MOCK__DECODE_S": "0.02"}
    workers = await fleet.processes.start(
        "ray workers", "vlm", "ray-workers", "--ray", cluster.address, "--workers",
        str(NUM_WORKERS), "--set", "logs.level=warning", **environment,
    )  # fmt: skip
    registry = Registry(fleet.redis, PREFIX)

    async def are_up() -> bool:
        assert workers.process.returncode is None, "".join(workers.lines)
        return len(await registry.workers()) == NUM_WORKERS

    await until(are_up, WITHIN_S)
    before = {worker.worker_id for worker in await registry.workers()}
    texts = [fleet.name() for _ in range(NUM_STREAMS)]
    async with playing(fleet, texts, num_tokens=300) as clients:
        await tokens_seen(fleet, clients, texts, 10)
        await asyncio.to_thread(cluster.kill, cluster.nodes[0])
    assert clients.history.outcomes() == {FINISHED: NUM_STREAMS}
    cluster.add()  # Ray sets signal handlers, so not in a thread

    async def is_back() -> bool:
        now = {worker.worker_id for worker in await registry.workers()}
        return len(now) == NUM_WORKERS and now != before

    await until(is_back, WITHIN_S)
    assert any("again in" in line for line in workers.lines)
    workers.signal(signal.SIGTERM)
    assert await workers.ended() == 0
    assert await registry.workers() == []
    await registry.close()


def servers_of(model: Path) -> list[psutil.Process]:
    """The stand-in servers that the workers have started for a model."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = process.cmdline()
            is_server = str(model) in command and not any("guard.py" in word for word in command)
            if is_server and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def num_requests(server: psutil.Process) -> float:
    command = server.cmdline()
    port = command[command.index("--port") + 1]
    return read_metric(f"http://127.0.0.1:{port}", "vllm:num_requests_running")


async def test_the_server_of_an_engine_ends_with_its_actor(fleet, cluster, tmp_path):
    """The actor's worker has started it; another worker continues the answer at a server of its own."""
    model = tmp_path / "tiny"
    make_checkpoint("tiny", model, seed=3)
    command = [
        "env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tests.engines.upstream.stand_in"
    ]  # fmt: skip
    workers = await fleet.processes.start(
        "ray workers", "vlm", "ray-workers", "--ray", cluster.address, "--workers", "2",
        VLM_ENGINE__KIND="vllm", VLM_ENGINE__COMMAND=shlex.join(command),
        VLM_ENGINE__MODEL=str(model), VLM_ENGINE__SERVED_NAME="tiny",
    )  # fmt: skip
    registry = Registry(fleet.redis, PREFIX)

    async def are_up() -> bool:
        assert workers.process.returncode is None, "".join(workers.lines)
        return len(await registry.workers()) == 2

    await until(are_up, WITHIN_S)
    expected = await read(fleet.url, asyncio.Event())
    middle = asyncio.Event()
    answer = asyncio.create_task(read(fleet.url, middle))
    await asyncio.wait_for(middle.wait(), WITHIN_S)
    [server] = [each for each in servers_of(model) if num_requests(each)]
    actor = server.parents()[2]  # above the guard and the worker
    assert "WorkerActor" in actor.cmdline()[0]
    actor.kill()
    assert await asyncio.wait_for(answer, WITHIN_S) == expected
    await until(lambda: server not in servers_of(model), WITHIN_S)
    await until(lambda: len(servers_of(model)) == 2, WITHIN_S)  # Ray has placed another actor
    workers.signal(signal.SIGTERM)
    assert await workers.ended() == 0
    assert servers_of(model) == []
    await registry.close()


def test_an_address_without_a_cluster_is_one_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "vlm", "ray-workers", "--ray", "127.0.0.1:1"],
        cwd=ROOT, env={**os.environ, "VLM_REDIS_URL": "redis://127.0.0.1:1", "VLM_ENGINE__KIND": "mock"},
        capture_output=True, text=True, timeout=WITHIN_S,
    )  # fmt: skip
    assert done.returncode == os.EX_CONFIG
    assert sum("--ray 127.0.0.1:1: " in line for line in done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
