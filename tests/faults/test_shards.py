"""Three Redis servers as shards: a fault of one shard does not pause the streams of others."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from shared.queue.keys import RedisKeys
from shared.redis.client import create_redis
from shared.redis.embedded import EmbeddedRedis
from shared.settings.tree import RedisSettings
from tests.faults.fleet import Fleet, playing, run_fleet_at, tokens_seen
from tests.faults.history import FINISHED
from tests.faults.processes import MODEL, PREFIX
from tests.faults.rest import redis_leftovers
from tests.waiting import until_equal, wait_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: The first shard is not the one that serves all requests without a key.
NAMES = "bac"
NUM_STREAMS = 18
#: Longer than pauses of Redis and of this machine, shorter than the shortest fault.
SHORT_S = 1.5


class ShardedFleet(Fleet):
    """A fleet with three Redis servers."""

    servers: list[EmbeddedRedis]

    async def at_rest(self) -> None:
        """See `Fleet.at_rest`; checks all servers that run."""
        for server in self.servers:
            if server.exit_code is None:
                async with create_redis(RedisSettings(url=server.url)) as redis:
                    read = partial(redis_leftovers, redis, PREFIX)
                    await until_equal(read, [], 30.0)

    async def placed(self, server: EmbeddedRedis) -> set[str]:
        """Returns the IDs of all requests of a server, including those that have ended."""
        async with create_redis(RedisSettings(url=server.url)) as redis:
            prefix = RedisKeys(PREFIX).requests(MODEL)
            return {key.decode()[len(prefix) :] async for key in redis.scan_iter(f"{prefix}*")}


@asynccontextmanager
async def run_shards(folder: Path) -> AsyncIterator[ShardedFleet]:
    """Runs three servers, a gateway and two workers."""
    with ExitStack() as stack:
        servers = [EmbeddedRedis(folder / name) for name in NAMES]
        urls = []
        for name, server in zip(NAMES, servers, strict=True):
            stack.callback(server.stop)
            urls.append(f"{name}={server.start()}")
        async with run_fleet_at(",".join(urls), servers[0].url) as plain:
            fleet = ShardedFleet(plain.processes, plain.gateway, plain.url)
            fleet.servers = servers
            for _ in range(2):  # exactly as many seats as a test has streams
                await fleet.worker(VLM_ENGINE__MAX_NUM_SEQS=str(NUM_STREAMS // 2))
            yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ShardedFleet]:
    """A fleet for tests that leave every server running."""
    async with run_shards(tmp_path_factory.mktemp("shards")) as fleet:
        yield fleet


def kill(server: EmbeddedRedis) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: server.exit_code is not None)


async def test_streams_of_a_returning_shard_continue_and_their_copies_are_cancelled(
    fleet: ShardedFleet,
):
    texts = [fleet.name() for _ in range(NUM_STREAMS)]
    async with playing(fleet, texts, num_tokens=120) as clients:
        await tokens_seen(fleet, clients, texts, 10)
        kill(fleet.servers[2])
        await asyncio.sleep(1.0)  # duration of the fault
        await asyncio.to_thread(fleet.servers[2].restart)
    assert clients.history.outcomes() == {FINISHED: NUM_STREAMS}


async def test_streams_continue_without_a_shard_that_stays_down(fleet: ShardedFleet):
    """This is the last test of the fleet. It kills the first shard, which also has the worker registry."""
    victim, texts = fleet.servers[0], [fleet.name() for _ in range(NUM_STREAMS)]
    before = await fleet.placed(victim)
    async with playing(fleet, texts, num_tokens=120) as clients:
        await tokens_seen(fleet, clients, texts, 10)
        num_there = len(await fleet.placed(victim) - before)
        kill(victim)
    assert num_there > 0
    assert clients.history.outcomes() == {FINISHED: NUM_STREAMS}
    paused = [text for text in texts if clients.history.longest_pause_s(text) > SHORT_S]
    assert len(paused) <= num_there
    async with playing(fleet, [fleet.name() for _ in range(20)], num_tokens=5) as clients:
        pass
    assert clients.history.outcomes() == {FINISHED: 20}
    async with httpx.AsyncClient(trust_env=False, timeout=30, verify=False) as client:
        kept = {"model": MODEL, "input": "hello"}
        answer = await client.post(f"{fleet.url}/v1/responses", json=kept)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
    assert "retry-after" in answer.headers
