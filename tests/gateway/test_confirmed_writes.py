"""Data that outlives its connection is acknowledged only after a replica of Redis has it."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.queue.api import QueueUnavailable
from shared.records.store import Record, RecordStore, RecordsUnavailable
from shared.redis.client import create_redis
from shared.redis.confirm import WITHIN_S, Confirmer
from shared.redis.embedded import EmbeddedRedis
from shared.sessions.store import Session, SessionStore, TaskRecord
from shared.settings.tree import RedisSettings
from tests.factories_gateway import RunningGateway, make_body, say_hello, talk_on
from tests.faults.proxy import FaultProxy, run_proxy
from tests.waiting import until

RESPONSES = "/v1/responses"


@dataclass
class Pair:
    """A primary and a replica that replicates it through `line`."""

    primary: Redis
    replica: Redis
    line: FaultProxy
    server: EmbeddedRedis

    async def promote(self) -> None:
        """Kills the primary and promotes the replica."""
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGKILL)
        await until(lambda: self.server.exit_code is not None)
        await self.replica.execute_command("REPLICAOF", "NO", "ONE")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        servers: list[EmbeddedRedis] = []
        clients: list[Redis] = []
        for name in ("primary", "replica"):
            servers.append(EmbeddedRedis(tmp_path / name))
            stack.callback(servers[-1].stop)
            clients.append(create_redis(RedisSettings(url=servers[-1].start())))
            stack.push_async_callback(clients[-1].aclose)
        line = await stack.enter_async_context(run_proxy(servers[0].socket_path))
        await clients[1].config_set("appendonly", "no")  # Redis cannot exit while it rewrites it
        await clients[1].execute_command("REPLICAOF", "127.0.0.1", line.port)

        async def is_followed() -> bool:
            role: Any = await clients[0].execute_command("ROLE")
            return len(role[2]) == 1

        await until(is_followed)
        yield Pair(clients[0], clients[1], line, servers[0])


@pytest.fixture
def redis_server(pair: Pair) -> str:
    """The Redis that the gateway, its worker and the clients of this file use: the primary."""
    return pair.server.url


@pytest.fixture
async def store(pair: Pair) -> AsyncIterator[RecordStore]:
    store = RecordStore(pair.primary, "t", ttl_s=60.0, max_records=1000, max_bytes=10**6)
    yield store
    await store.close()


async def test_a_record_is_on_the_replica_or_refused_and_delays_no_other_command(
    pair: Pair, store: RecordStore
):
    await store.put("me", "one", Record(b"x"))
    assert await pair.replica.exists("t:{me}:record:one")
    await store.delete("me", "one")
    assert not await pair.replica.exists("t:{me}:record:one")
    await store.put("me", "one", Record(b"x"))
    pair.line.freeze()
    began_at = time.monotonic()
    putting = asyncio.create_task(store.put("me", "two", Record(b"x")))
    assert await store.get("me", "one") is not None
    assert not putting.done()
    with pytest.raises(RecordsUnavailable, match="no replica"):
        await putting
    assert WITHIN_S / 2 < time.monotonic() - began_at < 4 * WITHIN_S


async def test_a_failover_loses_nothing_that_was_acknowledged(pair: Pair, store: RecordStore):
    """Eight clients store records; meanwhile the line to the replica freezes and the primary dies."""
    acknowledged: list[str] = []

    async def submit(client: int) -> None:
        for number in range(1000):
            try:
                await store.put("me", f"{client}-{number}", Record(b"x"))
            except RecordsUnavailable:
                return
            acknowledged.append(f"{client}-{number}")

    submitting = asyncio.gather(*(submit(client) for client in range(8)))
    await until(lambda: len(acknowledged) > 50)
    pair.line.freeze()
    await submitting
    await pair.promote()
    kept = await pair.replica.zrange("t:{me}:records", 0, -1)
    assert {name.encode() for name in acknowledged} <= set(kept)
    assert len(acknowledged) > 50


async def test_a_primary_that_lacks_the_write_confirms_nothing(pair: Pair):
    """A failover happened between the write and its confirmation."""
    confirmer = Confirmer(pair.primary, "t:confirmation")
    try:
        await pair.primary.set("here", 1)
        await confirmer.confirm(("EXISTS", "here"))
        results = await asyncio.gather(
            confirmer.confirm(("EXISTS", "here")),
            confirmer.confirm(("EXISTS", "here"), ("EXISTS", "elsewhere")),
            return_exceptions=True,
        )
    finally:
        await confirmer.close()
    assert results[0] is None
    assert isinstance(results[1], RedisError)


async def test_a_session_and_its_tasks_are_refused_unless_a_replica_has_them(pair: Pair):
    store = SessionStore(pair.primary, "t")
    task = TaskRecord("a", "id", "model", "", "", 0.0, 0.0)
    try:
        await store.create(Session("sess_1", "me", "app", time.time(), 60.0, 60.0))
        await store.add((await store.find("sess_1")).session, task, 10)  # type: ignore[union-attr]
        await store.confirm("sess_1", task)
        with pytest.raises(QueueUnavailable, match="does not have the write"):
            await store.confirm("sess_2", task)
        pair.line.freeze()
        for refused in (
            store.confirm("sess_1", task),
            store.create(Session("sess_2", "me", "app", time.time(), 60.0, 60.0)),
        ):
            with pytest.raises(QueueUnavailable, match="no replica"):
                await refused
    finally:
        await store.close()


async def test_requests_that_outlive_their_connection_are_refused_while_no_replica_has_them(
    pair: Pair, gateway: RunningGateway, worker
):
    body, once = {"model": "tiny", "input": "hello"}, {"idempotency-key": "once"}
    assert (await gateway.client.post(RESPONSES, json=body)).status_code == 200
    pair.line.freeze()
    for refused in (
        await gateway.chat(headers=once),
        await gateway.client.post(RESPONSES, json=body),
    ):
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert (await gateway.chat()).status_code == 200
    worker.script = talk_on
    resumable = {"x-vlm-resumable": "true"}  # nobody can resume the request, so it is cancelled
    refused = await gateway.chat(make_body(stream=True), headers=resumable)
    assert refused.status_code == 503
    await asyncio.wait_for(worker.cancelled.wait(), 20.0)
    worker.script = say_hello
    pair.line.thaw()
    num_before = len(worker.answers)
    answers = [await gateway.chat(headers=once) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(worker.answers) == num_before  # the retries get the answer of the refused request
