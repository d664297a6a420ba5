"""Batch requests in Redis. tests/contract/test_call_queue.py and tests/worker/test_worker.py test their order."""

import asyncio

import pytest

from shared.protocol import Call, Priority
from shared.queue.api import QueueRefused
from tests.factories_queue import MODEL, Ends, call_of, make_request


async def enqueue_batch(ends: Ends, **options) -> Call:
    return await ends.enqueue(make_request(priority=Priority.BATCH), **options)


async def test_batch_entries_taken_without_a_claim_are_delivered_again(ends):
    worker = ends.worker("a", unknown_after_s=0.0)
    await worker.create_group()
    request = await enqueue_batch(ends)
    await worker.read(1, 0.01)
    entries = await worker.entries.take(8)  # taken, but not claimed
    assert len(entries) == 1

    await asyncio.sleep(0.002)
    [claim] = await worker.reconcile()
    assert call_of(claim) == request


async def test_expired_batch_requests_are_neither_counted_nor_delivered(ends):
    worker = ends.worker("a")
    await worker.create_group()
    lost = [await enqueue_batch(ends) for _ in range(3)]
    await worker.read(1, 0.01)
    for request in lost:
        await ends.redis.delete(ends.keys.request(MODEL, request.id))

    kept = await enqueue_batch(ends, max_waiting=1)
    with pytest.raises(QueueRefused, match="queue_full"):
        await enqueue_batch(ends, max_waiting=1)
    assert (await ends.queue.stats(MODEL)).num_backlog == 1
    taken = [claim for _ in range(4) for claim in await worker.take(8)]
    assert [call_of(claim) for claim in taken] == [kept]
    assert await ends.num_open() == 1


async def test_a_request_in_two_replies_is_claimed_once(ends, monkeypatch):
    """A read and a take run at the same time, both return the request, and their replies arrive together."""
    worker = ends.worker("a")
    await worker.create_group()
    await worker.read(1, 0.01)
    replied, has_run = asyncio.Event(), asyncio.Queue()

    def hold_back(command):
        async def run(*arguments):
            reply = await command(*arguments)
            has_run.put_nowait(command)
            await replied.wait()
            return reply

        monkeypatch.setattr(worker.entries, command.__name__, run)

    hold_back(worker.entries.take)
    hold_back(worker.entries.wait)
    requests = [await enqueue_batch(ends), await enqueue_batch(ends)]
    take = asyncio.create_task(worker.take(8))
    await has_run.get()
    requests += [await ends.enqueue()]
    read = asyncio.create_task(worker.read(8, 1.0))
    await has_run.get()
    replied.set()
    claims = [*await take, *await read]
    assert sorted(claim.id for claim in claims) == sorted(request.id for request in requests)
