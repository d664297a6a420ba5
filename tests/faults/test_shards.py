"""Three Redis servers as shards: a fault of one does not pause the streams of the others."""

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

#: The first is not the one that all requests without a key are on, where a key may have few.
NAMES = "bac"
NUM_STREAMS = 18
#: Redis's own pauses and this machine's are shorter, the shortest fault is longer.
SHORT_S = 1.5


class ShardedFleet(Fleet):
    """A fleet whose Redis is three servers."""

    servers: list[EmbeddedRedis]

    async def at_rest(self) -> None:
        """See `Fleet.at_rest`: on all servers that run."""
        for server in self.servers:
            if server.exit_code is None:
                async with create_redis(RedisSettings(url=server.url)) as redis:
                    read = partial(redis_leftovers, redis, PREFIX)
                    await until_equal(read, [], 30.0)

    async def placed(self, server: EmbeddedRedis) -> set[str]:
        """The requests of a server, by id, also those that have ended."""
        async with create_redis(RedisSettings(url=server.url)) as redis:
            prefix = RedisKeys(PREFIX).requests(MODEL)
            return {key.decode()[len(prefix) :] async for key in redis.scan_iter(f"{prefix}*")}


@asynccontextmanager
async def run_shards(folder: Path) -> AsyncIterator[ShardedFleet]:
    """Three servers, a gateway and two workers."""
    with ExitStack() as stack:
        servers = [EmbeddedRedis(folder / name) for name in NAMES]
        urls = []
        for name, server in zip(NAMES, servers, strict=True):
            stack.callback(server.stop)
            urls.append(f"{name}={server.start()}")
        async with run_fleet_at(",".join(urls), servers[0].url) as plain:
            fleet = ShardedFleet(plain.processes, plain.gateway, plain.url)
            fleet.servers = servers
            for _ in range(2):  # they have seats for the streams of a test, and no more
                await fleet.worker(VLM_ENGINE__MAX_NUM_SEQS=str(NUM_STREAMS // 2))
            yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ShardedFleet]:
    """Of all tests after which every server runs."""
    async with run_shards(tmp_path_factory.mktemp("shards")) as fleet:
        yield fleet


def kill(server: EmbeddedRedis) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    wait_for(lambda: server.exit_code is not None)


async def test_a_shard_that_returns_has_its_streams_continued_and_its_copies_cancelled(
    fleet: ShardedFleet,
):
    texts = [fleet.name() for _ in range(NUM_STREAMS)]
    async with playing(fleet, texts, num_tokens=120) as clients:
        await tokens_seen(fleet, clients, texts, 10)
        kill(fleet.servers[2])
        await asyncio.sleep(1.0)  # the fault's length
        await asyncio.to_thread(fleet.servers[2].restart)
    assert clients.history.outcomes() == {FINISHED: NUM_STREAMS}


async def test_streams_go_on_without_a_shard_that_is_killed_for_good(fleet: ShardedFleet):
    """The last test of the fleet. It is the first shard, which gateways also know the workers from."""
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
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        kept = {"model": MODEL, "input": "hello"}
        answer = await client.post(f"{fleet.url}/v1/responses", json=kept)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "service_unavailable")
    assert "retry-after" in answer.headers
