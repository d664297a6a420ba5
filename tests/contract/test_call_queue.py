"""What every call queue keeps, whoever implements it: one suite over all of them.

An implementation is a line in `QUEUES`: a factory of an open queue, its workers and its mailbox.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest

import shared.redis.embedded
from shared.protocol import Envelope, seal
from shared.queue.api import (
    Bounds,
    Claim,
    DuplicateRequest,
    GatewayQueue,
    Publication,
    QueueRefused,
    WorkerQueue,
)
from shared.redis.client import create_redis
from shared.redis.embedded import EmbeddedRedis
from shared.settings.tree import RedisSettings
from tests.factories_queue import MODEL, Ends, make_request, open_ends

ROOM = Bounds(max_waiting=100, max_tokens=1_000_000)


class OpenQueue(Protocol):
    """A queue under test."""

    queue: GatewayQueue

    async def worker(self, name: str) -> WorkerQueue: ...

    async def lose_lease(self, claim: Claim) -> None: ...

    async def next_entry(self) -> bytes: ...


class RedisQueue:
    """The Redis implementation."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self.queue: GatewayQueue = ends.queue
        self._entries = ends.mailbox.events()

    async def worker(self, name: str) -> WorkerQueue:
        worker = self._ends.worker(name)
        await worker.create_group()
        return worker

    async def lose_lease(self, claim: Claim) -> None:
        await self._ends.let_lease_run_out(claim)

    async def next_entry(self) -> bytes:
        _, data = await anext(self._entries)
        return data

    async def close(self) -> None:
        await self._entries.aclose()  # type: ignore[attr-defined]


@asynccontextmanager
async def open_redis_queue(program: Path) -> AsyncIterator[RedisQueue]:
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="vlm-queue-") as folder,
    ):
        patch.setattr(shared.redis.embedded, "find_redis_server", lambda: program)
        server = EmbeddedRedis(Path(folder))
        settings = RedisSettings(url=await asyncio.to_thread(server.start))
        redis, blocking = create_redis(settings), create_redis(settings, blocking=True)
        try:
            async with open_ends(redis, blocking, "contract") as ends:
                opened = RedisQueue(ends)
                yield opened
                await opened.close()
        finally:
            await redis.aclose()
            await blocking.aclose()
            await asyncio.to_thread(server.stop)


QUEUES: dict[str, Callable[[Path], AbstractAsyncContextManager[OpenQueue]]] = {
    "redis": open_redis_queue
}


@pytest.fixture(params=QUEUES)
async def opened(request, redis_program) -> AsyncIterator[OpenQueue]:
    async with QUEUES[request.param](redis_program) as queue:
        yield queue


async def submit(opened: OpenQueue, payload: bytes = b"any bytes: \x00\xff", **room) -> Envelope:
    envelope = seal(make_request())._replace(payload=payload)
    bounds = Bounds(**room) if room else ROOM
    await opened.queue.submit([envelope], timeout_s=60, num_tokens=1, bounds=bounds)
    return envelope


def tokens(claim: Claim, number: int, index: int, count: int) -> Publication:
    return Publication(claim, number, index, count, b'"%d+%d"' % (index, count))


def end(claim: Claim, number: int, index: int) -> Publication:
    return Publication(claim, number, index, 0, b'"end"', "finished")


async def state(opened: OpenQueue, envelope: Envelope) -> str:
    found = await opened.queue.state(MODEL, envelope.id)
    assert found is not None
    return found.state


async def test_a_call_travels_as_opaque_bytes_and_its_events_come_back(opened):
    envelope = await submit(opened)
    worker = await opened.worker("a")
    [claim] = await worker.read(1, 1.0)
    assert (claim.id, claim.payload, claim.reply_to) == (
        envelope.id, envelope.payload, envelope.reply_to,
    )  # fmt: skip
    assert (claim.attempt, claim.log, claim.is_suspect) == (1, (), False)
    assert await state(opened, envelope) == "running"

    assert await worker.publish([tokens(claim, 1, 0, 2)]) == {}
    assert await worker.publish([end(claim, 2, 2)]) == {}

    assert [await opened.next_entry() for _ in range(2)] == [b'["0+2"]', b'["end"]']
    assert await opened.queue.events(MODEL, envelope.id) == [b'"0+2"', b'"end"']
    assert await state(opened, envelope) == "finished"


async def test_a_repeated_publication_changes_nothing(opened):
    envelope = await submit(opened)
    worker = await opened.worker("a")
    [claim] = await worker.read(1, 1.0)
    for said in (tokens(claim, 1, 0, 2), end(claim, 2, 2)):
        assert await worker.publish([said]) == {}
        assert await worker.publish([said]) == {}
    assert await opened.queue.events(MODEL, envelope.id) == [b'"0+2"', b'"end"']


async def test_a_gap_in_the_tokens_is_refused(opened):
    await submit(opened)
    worker = await opened.worker("a")
    [claim] = await worker.read(1, 1.0)
    assert await worker.publish([tokens(claim, 1, 3, 1)]) == {claim.id: "gap"}


async def test_a_later_attempt_has_the_log_and_fences_the_earlier_one(opened):
    envelope = await submit(opened)
    first, second = await opened.worker("a"), await opened.worker("b")
    [claim] = await first.read(1, 1.0)
    await first.publish([tokens(claim, 1, 0, 2)])

    await opened.lose_lease(claim)
    [later] = await second.reclaim(1)

    assert (later.id, later.attempt, later.log) == (envelope.id, 2, (b'"0+2"',))
    assert await first.publish([tokens(claim, 2, 2, 1)]) == {claim.id: "fenced"}
    assert await first.renew([claim]) == {claim.id: "fenced"}
    assert await second.renew([later]) == {}
    assert await second.publish([end(later, 1, 2)]) == {}


async def test_a_released_call_is_another_workers_without_blame(opened):
    await submit(opened)
    first, second = await opened.worker("a"), await opened.worker("b")
    [claim] = await first.read(1, 1.0)
    assert await first.release([claim]) == 1
    [later] = await second.reclaim(1)
    assert (later.id, later.attempt, later.failures) == (claim.id, 2, 0)


async def test_a_cancelled_call_is_nobodys(opened):
    waiting, running = await submit(opened), await submit(opened)
    worker = await opened.worker("a")
    await opened.queue.cancel(MODEL, [waiting.id])
    [claim] = await worker.read(2, 1.0)
    assert claim.id == running.id
    await opened.queue.cancel(MODEL, [running.id, "unknown"])
    assert await worker.publish([end(claim, 1, 0)]) == {claim.id: "cancelled"}
    assert await state(opened, running) == "cancelled"


async def test_a_known_id_and_a_full_queue_are_refused(opened):
    envelope = await submit(opened)
    with pytest.raises(DuplicateRequest):
        await opened.queue.submit([envelope], timeout_s=60, num_tokens=1, bounds=ROOM)
    with pytest.raises(QueueRefused) as refused:
        await submit(opened, max_waiting=1, max_tokens=10)
    assert refused.value.reason == "queue_full"


async def test_an_unknown_call_has_no_state(opened):
    assert await opened.queue.state(MODEL, "unknown") is None
    assert await opened.queue.events(MODEL, "unknown") == []
