"""The queue's use of Redis: leases, wakeups, invalid entries, crash counts.

The contract of every queue is in tests/contract/test_call_queue.py; lost replies and restarts are in
test_queue_model.py.
"""

import asyncio
import time

import pytest

from shared.protocol import ErrorCode, Failed, Priority
from shared.queue.api import CLEARED_AFTER_TOKENS, QueueUnavailable
from shared.queue.keys import GROUP
from shared.queue.worker import CHECK_EVERY, LOSSES_PER_ATTEMPT
from shared.redis.client import Script
from tests.factories_queue import (
    MODEL,
    Clock,
    call_of,
    events_of,
    make_delta,
    make_finished,
    make_request,
    publication,
    tokens_of,
)


@pytest.mark.parametrize("all_of_them", [False, True])
async def test_redis_serves_other_clients_while_many_requests_are_cancelled(ends, all_of_them):
    """No single script cancels all of them: in between, other clients see some cancelled and some waiting."""
    requests = [make_request() for _ in range(2000)]
    await asyncio.gather(*(ends.enqueue(request, max_waiting=5000) for request in requests))
    ids = [request.id for request in requests]
    cancelling = asyncio.create_task(
        ends.queue.fail_all(MODEL, ErrorCode.WORKER_LOST, "gone")
        if all_of_them
        else ends.queue.cancel(MODEL, ids)
    )
    seen = set()
    while not cancelling.done():
        seen.add(await ends.redis.xlen(ends.keys.queue(MODEL)))
    assert await cancelling == (2000 if all_of_them else None)
    assert seen - {0, 2000}
    assert await ends.num_open() == 0
    states = await asyncio.gather(*(ends.queue.state(MODEL, id_) for id_ in ids))
    assert {state.state for state in states} == {"failed" if all_of_them else "cancelled"}


async def test_calls_that_no_worker_can_serve_fail_with_an_event(ends, clock):
    await ends.mailbox.open([MODEL])
    worker = ends.worker("a")
    running = await ends.enqueue()
    claim = await ends.claim(worker)
    await worker.publish([publication(claim, 1, 0, make_delta(claim, 0, 7))])
    for _ in range(2):  # the first call lists all entries
        assert await worker.renew([claim]) == {}
    waiting = [await ends.enqueue(), await ends.enqueue(make_request(priority=Priority.BATCH))]
    assert await ends.queue.fail_all(MODEL, ErrorCode.WORKER_LOST, "gone") == 3
    assert await ends.queue.fail_all(MODEL, ErrorCode.WORKER_LOST, "gone") == 0
    for request in (running, *waiting):
        attempt = 1 if request is running else 0
        failed = Failed(request.id, attempt, ErrorCode.WORKER_LOST, "gone")
        async with asyncio.timeout(10):
            while (await ends.next_events())[-1] != failed:
                pass
        assert (await events_of(ends.queue, request.id))[-1] == failed
    ended = {running.id: "ended"}
    assert await worker.renew([claim]) == ended
    assert await worker.publish([publication(claim, 2, 1, make_finished(claim, 1))]) == ended
    assert await ends.num_open() == 0


@pytest.mark.parametrize(
    ("num_tokens", "num_losses", "code", "reason"),
    [
        (CLEARED_AFTER_TOKENS, 2 * LOSSES_PER_ATTEMPT, ErrorCode.TOO_MANY_ATTEMPTS, b"exhausted"),
        (CLEARED_AFTER_TOKENS - 1, 2, ErrorCode.REQUEST_KILLS_WORKERS, b"kills_workers"),
    ],
)
async def test_losses_count_as_crashes_until_a_poison_request_is_cleared(
    ends, num_tokens, num_losses, code, reason
):
    """A cleared request is retried far beyond the usual attempts if its workers die with other requests."""
    request = await ends.enqueue()
    claim = await ends.claim(ends.worker("first"))
    worker = ends.worker("a", max_attempts=2)
    for number in range(num_losses - 1):
        claim = await ends.take_over(worker, claim)
        assert await worker.begin(claim)
        assert claim.failures == 1
        index = number * num_tokens
        delta = make_delta(claim, index, *range(index, index + num_tokens))
        assert await worker.publish([publication(claim, 1, index, delta)]) == {}
    await ends.let_lease_run_out(claim)

    assert await worker.reclaim(1) == []

    events = [event for _ in range(num_losses) for event in await ends.next_events()]
    assert isinstance(events[-1], Failed)
    assert events[-1].code is code
    late = await ends.enqueue()
    await ends.redis.hset(ends.keys.request(MODEL, late.id), "deadline_ms", 1)
    assert await worker.read(1, 1.0) == []
    [(_, dead)] = await ends.redis.xrange(ends.keys.dead(MODEL))
    attempt = b"%d" % (num_losses + 1)
    assert dead == {
        b"id": request.id.encode(), b"reason": reason, b"attempt": attempt, b"worker": b"a",
    }  # fmt: skip


async def test_a_released_request_wakes_a_waiting_worker(ends):
    leaving, waiting = ends.worker("a"), ends.worker("b")
    await ends.enqueue()
    claim = await ends.claim(leaving)
    await leaving.publish([publication(claim, 1, 0, make_delta(claim, 0, 5))])
    reading = asyncio.create_task(waiting.read(4, 30.0))
    await asyncio.sleep(0.02)  # the worker usually blocks by now; the test passes either way

    assert await leaving.release([claim]) == 1

    [later] = await asyncio.wait_for(reading, 15.0)
    assert tokens_of(later) == (5,)
    assert (later.attempt, later.failures) == (2, 0)
    after = await leaving.publish([publication(claim, 2, 1, make_delta(claim, 1, 6))])
    assert after == {claim.id: "fenced"}


async def test_a_request_whose_release_failed_is_claimed_again(ends, monkeypatch):
    worker = ends.worker("a", unknown_after_s=0.0)
    await ends.enqueue()
    claim = await ends.claim(worker)
    monkeypatch.setattr("shared.queue.worker.RELEASE", Script("no Lua", "0" * 40))
    with pytest.raises(QueueUnavailable):
        await worker.release([claim])
    [again] = await worker.reconcile()
    assert (again.id, again.attempt) == (claim.id, 2)


async def test_invalid_queue_entries_are_removed_and_logged(ends, caplog):
    worker = ends.worker("a")
    await worker.create_group()
    for entry in ({"song": "la"}, {"id": b"\xff"}, {"id": "nobody"}):
        await ends.redis.xadd(ends.keys.queue(MODEL), entry)
    request = await ends.enqueue()
    await ends.redis.xadd(ends.keys.queue(MODEL), {"id": request.id})  # a second entry

    [claim] = await worker.read(8, 1.0)

    assert call_of(claim) == request
    assert await ends.num_open() == 1
    assert (await ends.redis.xpending(ends.keys.queue(MODEL), GROUP))["pending"] == 1
    assert "song" in caplog.text


async def test_a_renewal_reports_claims_that_a_failover_lost(ends):
    """A failover lost the claim but not the delivery of the entry, and another attempt runs the request."""
    worker = ends.worker("a", unknown_after_s=0.0)
    for _ in range(2):
        await ends.enqueue()
    await worker.create_group()
    gone, unclaimed = await worker.read(2, 1.0)
    await ends.redis.delete(ends.keys.request(MODEL, gone.id))
    key = ends.keys.request(MODEL, unclaimed.id)
    await ends.redis.hdel(key, "claim", "worker", "begun")
    await ends.redis.hset(key, mapping={"state": "queued", "attempt": "0"})

    lost = {gone.id: "gone", unclaimed.id: "fenced"}
    assert lost in [await worker.renew([gone, unclaimed]) for _ in range(CHECK_EVERY)]
    assert await worker.renew([gone, unclaimed]) == lost
    for events in (make_delta(gone, 0, 5), make_finished(gone)):
        assert await worker.publish([publication(gone, 1, 0, events)]) == {gone.id: "gone"}
    [again] = await worker.reconcile()
    assert again.id == unclaimed.id
    assert await ends.num_open() == 1


async def test_a_gap_in_the_wakeups_hides_no_cancelled_request(ends, clock):
    """After a failover to a replica that lacks the last wakeups and whose clock is behind."""
    worker = ends.worker("a")
    await ends.enqueue()
    claim = await ends.claim(worker)
    stream = ends.keys.wakeups(MODEL, "a")
    for _ in range(2):
        assert await worker.renew([claim]) == {}

    await ends.redis.delete(stream)
    await ends.redis.xgroup_create(stream, GROUP, mkstream=True)
    await ends.redis.xadd(stream, {"id": "another"}, id="1-1")
    await ends.redis.expire(stream, 10)
    await ends.queue.cancel(MODEL, [claim.id])
    assert await worker.renew([claim]) == {claim.id: "cancelled"}


async def test_a_takeover_during_a_renewal_is_not_undone(ends, clock, monkeypatch):
    worker, other = ends.worker("a"), ends.worker("b")
    await ends.enqueue()
    claim = await ends.claim(worker)
    assert await worker.renew([claim]) == {}
    clock.pass_time(3.0)
    lost = worker.entries.pop_lost

    async def lost_before_the_takeover():
        found = await lost()
        await ends.take_over(other, claim)
        return found

    monkeypatch.setattr(worker.entries, "pop_lost", lost_before_the_takeover)
    assert await worker.renew([claim]) == {claim.id: "fenced"}
    [lease] = await ends.redis.xpending_range(ends.keys.queue(MODEL), GROUP, "-", "+", 1)
    assert (lease["message_id"], lease["consumer"]) == (claim.entry_id, b"b")


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """A fake clock; also disables the periodic check of all requests."""
    clock = Clock()
    monkeypatch.setattr("shared.queue.worker.time", clock)
    monkeypatch.setattr("shared.queue.worker.CHECK_EVERY", 10**9)
    return clock


async def test_a_crash_names_the_tenant_of_a_request_cancelled_before(ends):
    """Also names the tenants of the running requests."""
    for name in ("a", "a", "c"):
        await ends.enqueue(make_request(tenant=name))
    worker, other = ends.worker("w"), ends.worker("v")
    await worker.create_group()
    first, second = await worker.read(2, 1.0)
    [last] = await other.read(1, 1.0)
    waiting = await ends.enqueue(make_request(tenant="b"))
    await ends.queue.cancel(MODEL, [first.id, waiting.id])
    await worker.publish([publication(second, 1, 0, make_finished(second))])
    assert await ends.queue.crash_tenants(MODEL, "w") == {"a"}
    await other.release([last], is_crash=True)
    assert await ends.queue.crash_tenants(MODEL, "v") == {"c"}
    assert await ends.queue.crash_tenants(MODEL, "unknown") == frozenset()
    for key in await ends.redis.keys(f"{ends.prefix}:*"):
        assert await ends.redis.ttl(key) > 0


@pytest.mark.parametrize("has_workers", [False, True])
async def test_the_age_of_a_queue_is_that_of_its_oldest_waiting_request(ends, has_workers):
    """Autoscaling uses this age, which is derived from the time in entry IDs."""
    queue = ends.keys.queue(MODEL)
    if has_workers:
        await ends.worker("a").create_group()
    assert (await ends.queue.stats(MODEL)).age_s == 0.0
    for age_s in (90.0, 60.0):
        entry = f"{round((time.time() - age_s) * 1000)}-0"
        await ends.redis.xadd(queue, {"id": "request"}, id=entry)
    assert (await ends.queue.stats(MODEL)).age_s == pytest.approx(90.0, abs=5)
    if has_workers:
        for left_s in (60.0, 0.0):
            await ends.redis.xreadgroup(GROUP, "worker", {queue: ">"}, count=1)
            assert (await ends.queue.stats(MODEL)).age_s == pytest.approx(left_s, abs=5)


async def test_a_takeover_interrupted_by_a_stop_still_counts_the_crash_of_the_lost_worker(ends):
    lost, leaving, other = ends.worker("a"), ends.worker("b"), ends.worker("c")
    await ends.enqueue()
    claim = await ends.claim(lost)
    # The entry was transferred, but the worker stopped before the claim.
    await ends.redis.xclaim(ends.keys.queue(MODEL), GROUP, "b", 0, [claim.entry_id])

    await leaving.leave()

    [later] = await other.read(1, 1.0)
    assert (later.attempt, later.failures) == (2, 1)
    consumers = await ends.redis.xinfo_consumers(ends.keys.queue(MODEL), GROUP)
    assert b"b" not in {consumer["name"] for consumer in consumers}
