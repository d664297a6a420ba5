"""Workers on a Ray cluster of three nodes, of which one is killed under load."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.queue.registry import Registry
from tests.faults.fleet import Fleet, playing, run_fleet, tokens_seen
from tests.faults.history import FINISHED
from tests.faults.processes import PREFIX, ROOT
from tests.long import long
from tests.waiting import until

NUM_WORKERS = 3
NUM_STREAMS = 6
WITHIN_S = 60.0
#: A raylet waits 15 s for its agents, which can be too short on a busy machine.
TRIES = 3
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}

ray = pytest.importorskip("ray", reason="ray is not installed: make faults installs it apart")
pytestmark = long("faults")


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Nodes as processes with one CPU each, so that each runs one worker; the head node runs none."""
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    head = {**NODE, "num_cpus": 0, "include_dashboard": False}
    for number in range(1, TRIES + 1):
        try:
            cluster = Cluster(initialize_head=True, head_node_args=head)
            for _ in range(NUM_WORKERS):
                cluster.add_node(**NODE, wait=False)
            cluster.wait_for_nodes()
            break
        except Exception:
            if number == TRIES:
                raise
    yield cluster
    cluster.shutdown()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with run_fleet(tmp_path) as fleet:
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
        [node, *_] = cluster.worker_nodes
        await asyncio.to_thread(cluster.remove_node, node, allow_graceful=False)
    assert clients.history.outcomes() == {FINISHED: NUM_STREAMS}
    cluster.add_node(**NODE, wait=True)  # not in a thread, because Ray sets signal handlers

    async def is_back() -> bool:
        now = {worker.worker_id for worker in await registry.workers()}
        return len(now) == NUM_WORKERS and now != before

    await until(is_back, WITHIN_S)
    assert any("restarting in" in line for line in workers.lines)
    workers.signal(signal.SIGTERM)
    assert await workers.ended() == 0
    assert await registry.workers() == []
    await registry.close()


def test_an_address_without_a_cluster_is_a_clear_error():
    done = subprocess.run(
        [sys.executable, "-m", "vlm", "ray-workers", "--ray", "127.0.0.1:1"],
        cwd=ROOT, env={**os.environ, "VLM_REDIS_URL": "redis://127.0.0.1:1", "VLM_ENGINE__KIND": "mock"},
        capture_output=True, text=True, timeout=WITHIN_S,
    )  # fmt: skip
    assert done.returncode == os.EX_CONFIG
    assert sum("--ray 127.0.0.1:1: " in line for line in done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
