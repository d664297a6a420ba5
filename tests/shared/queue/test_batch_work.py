"""Batch work, on a real Redis server: order, wakeups, and no starvation."""

import asyncio

import pytest

from shared.protocol import Call, Priority
from shared.queue.api import QueueRefused
from tests.factories_queue import (
    MODEL,
    Ends,
    call_of,
    enqueue,
    make_request,
)


async def enqueue_batch(ends: Ends, count: int = 1) -> list[Call]:
    return [await ends.enqueue(make_request(priority=Priority.BATCH)) for _ in range(count)]


async def make_older(ends: Ends, request: Call, age_s: float) -> None:
    """As if a batch request had come so long before."""
    [(entry, fields)] = await ends.redis.xrange(ends.keys.backlog(MODEL))
    milliseconds = int(entry.partition(b"-")[0]) - round(age_s * 1000)
    await ends.redis.delete(ends.keys.backlog(MODEL))
    older = await ends.redis.xadd(ends.keys.backlog(MODEL), fields, id=f"{milliseconds}-1")
    await ends.redis.hset(ends.keys.request(MODEL, request.id), "backlog", older)


async def test_batch_work_that_redis_has_forgotten_is_not_given(ends):
    worker = ends.worker("a")
    await worker.create_group()
    [request] = await enqueue_batch(ends)
    await worker.read(1, 0.01)
    await ends.redis.delete(ends.keys.request(MODEL, request.id))

    assert await worker.take(8) == []
    assert await ends.num_open() == 0


async def test_batch_work_that_waited_long_enough_queues_among_the_interactive(ends):
    worker = ends.worker("a")
    await worker.create_group()
    [old] = await enqueue_batch(ends)
    await worker.read(1, 0.01)
    await make_older(ends, old, 61.0)
    before = await ends.enqueue()

    await worker.entries.age(60.0)
    after = await ends.enqueue()

    claims = await worker.read(8, 1.0)
    assert [call_of(claim) for claim in claims] == [before, old, after]
    assert claims[1].waited_s < 60  # its own time is untouched by the test


async def test_batch_work_that_is_younger_stays_behind(ends):
    worker = ends.worker("a")
    await worker.create_group()
    await enqueue_batch(ends)
    await worker.read(1, 0.01)

    await worker.entries.age(60.0)

    assert worker.num_backlog == 1
    assert await worker.read(8, 0.01) == []


async def test_a_take_whose_reply_was_lost_is_found_again(ends):
    worker = ends.worker("a", unknown_after_s=0.0)
    await worker.create_group()
    [request] = await enqueue_batch(ends)
    await worker.read(1, 0.01)
    entries = await worker.entries.take(8)  # and nobody claims them
    assert len(entries) == 1

    await asyncio.sleep(0.002)
    [claim] = await worker.reconcile()
    assert call_of(claim) == request


async def test_batch_work_that_comes_and_goes_leaves_at_most_one_wakeup(ends):
    await ends.worker("a").create_group()
    for _ in range(5):
        request = await ends.enqueue(make_request(priority=Priority.BATCH))
        await ends.queue.cancel(MODEL, [request.id])
    assert await ends.redis.xlen(ends.keys.queue(MODEL)) == 1


async def test_batch_work_that_redis_has_forgotten_is_not_counted_as_waiting(ends):
    """No worker came in time; the backlog has the id still."""
    lost = [await ends.enqueue(make_request(priority=Priority.BATCH)) for _ in range(2)]
    for request in lost:
        await ends.redis.delete(ends.keys.request(MODEL, request.id))

    await enqueue(ends.queue, make_request(priority=Priority.BATCH), max_waiting=1)
    with pytest.raises(QueueRefused, match="queue_full"):
        await enqueue(ends.queue, make_request(priority=Priority.BATCH), max_waiting=1)
    assert (await ends.queue.stats(MODEL)).num_backlog == 1
