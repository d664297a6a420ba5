"""How the queue uses Redis: lost replies, forgotten scripts, entries that are no request, keys that expire.

The laws of every queue are tests/contract/test_call_queue.py.
"""

import asyncio

import pytest

from shared.protocol import (
    ErrorCode,
    Failed,
    Priority,
)
from shared.queue.api import (
    CLEARED_AFTER_TOKENS,
    Claim,
    QueueUnavailable,
)
from shared.queue.keys import GROUP
from shared.queue.worker import CHECK_EVERY, LOSSES_PER_ATTEMPT, RedisWorkerQueue
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


async def test_an_enqueue_whose_reply_was_lost_is_repeated_without_a_duplicate(ends, far, proxy):
    first, second = await far.enqueue(), make_request()
    proxy.drop_next_reply(after=second.id.encode())

    await far.enqueue(second)

    assert proxy.num_lost == 1
    assert await ends.redis.xlen(ends.keys.queue(MODEL)) == 2
    worker = ends.worker("a")
    await worker.create_group()
    assert [call_of(claim) for claim in await worker.read(8, 1.0)] == [first, second]


@pytest.mark.parametrize("all_of_them", [False, True])
async def test_redis_answers_others_while_many_are_cancelled(ends, all_of_them):
    """No script takes them all: others see some of them gone, and the rest wait."""
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


async def test_calls_that_no_worker_will_serve_fail_and_their_gateway_is_told(ends):
    await ends.mailbox.open([MODEL])
    worker = ends.worker("a")
    running = await ends.enqueue()
    claim = await ends.claim(worker)
    await worker.publish([publication(claim, 1, 0, make_delta(claim, 0, 7))])
    waiting = [await ends.enqueue(), await ends.enqueue(make_request(priority=Priority.BATCH))]
    assert await ends.queue.fail_all(MODEL, ErrorCode.WORKER_LOST, "gone") == 3
    assert await ends.queue.fail_all(MODEL, ErrorCode.WORKER_LOST, "gone") == 0
    for request in (running, *waiting):
        attempt = 1 if request is running else 0
        failed = Failed(request.id, attempt, ErrorCode.WORKER_LOST, "gone")
        async with asyncio.timeout(10):
            while (await ends.next_events())[-1] != failed:
                pass
    assert await worker.publish([publication(claim, 2, 1, make_finished(claim, 1))]) == {
        running.id: "ended"
    }
    assert await ends.num_open() == 0


async def test_a_gateway_without_a_mailbox_gets_none_but_the_log_is_written(ends):
    worker = ends.worker("a")
    request = await ends.enqueue(make_request(reply_to="gone"))
    claim = await ends.claim(worker)

    assert await worker.publish([publication(claim, 1, 0, make_delta(claim, 0, 5))]) == {}

    assert await ends.redis.exists(ends.keys.mailbox(MODEL, "gone")) == 0
    assert await events_of(ends.queue, request.id) == (make_delta(claim, 0, 5),)


async def test_a_worker_does_not_reclaim_what_it_holds_itself(ends):
    worker = ends.worker("a")
    await worker.create_group()
    await ends.enqueue()
    await ends.enqueue()
    for held in await worker.read(2, 1.0):
        await ends.redis.xclaim(
            *(ends.keys.queue(MODEL), GROUP, "a", 0, [held.entry_id]), idle=3_600_000, justid=True
        )
    lost = await ends.enqueue()
    claim = await ends.claim(ends.worker("b"))
    await ends.let_lease_run_out(claim)

    [later] = await worker.reclaim(1)

    assert call_of(later) == lost


async def test_a_lost_request_is_found_behind_many_that_are_alive(ends):
    holder = ends.worker("a")
    await holder.create_group()
    for _ in range(60):
        await ends.enqueue()
    claims = await holder.read(60, 1.0)
    await ends.let_lease_run_out(claims[-1])

    [later] = await ends.worker("b").reclaim(1)

    assert later.payload == claims[-1].payload


async def come_further(worker: RedisWorkerQueue, claim: Claim, num_tokens: int) -> None:
    index = len(tokens_of(claim))
    delta = make_delta(claim, index, *range(index, index + num_tokens))
    assert await worker.publish([publication(claim, 1, index, delta)]) == {}


async def test_losses_of_workers_that_ran_other_requests_too_do_not_count_as_crashes(ends):
    """The request is retried far beyond its attempts while its workers die with other requests."""
    await ends.enqueue()
    claim = await ends.claim(ends.worker("first"))
    worker = ends.worker("a", max_attempts=2)
    for _ in range(2 * LOSSES_PER_ATTEMPT - 2):
        claim = await ends.take_over(worker, claim)
        assert await worker.begin(claim)
        assert claim.failures == 1
        await come_further(worker, claim, CLEARED_AFTER_TOKENS)
    last = await ends.take_over(worker, claim)
    assert await worker.begin(last)
    await come_further(worker, last, CLEARED_AFTER_TOKENS)
    await ends.let_lease_run_out(last)

    assert await worker.reclaim(1) == []

    events = [e for _ in range(2 * LOSSES_PER_ATTEMPT) for e in await ends.next_events()]
    assert isinstance(events[-1], Failed)
    assert events[-1].code is ErrorCode.TOO_MANY_ATTEMPTS


async def test_losses_before_a_poison_request_is_cleared_count_as_crashes(ends):
    await ends.enqueue()
    worker = ends.worker("a", max_attempts=2)
    claim = await ends.take_over(worker, await ends.claim(ends.worker("first")))
    assert await worker.begin(claim)
    await come_further(worker, claim, CLEARED_AFTER_TOKENS - 1)
    await ends.let_lease_run_out(claim)

    assert await worker.reclaim(1) == []

    events = [e for _ in range(2) for e in await ends.next_events()]
    assert isinstance(events[-1], Failed)
    assert events[-1].code is ErrorCode.REQUEST_KILLS_WORKERS


async def test_a_request_that_ends_every_worker_is_given_up_and_remembered(ends):
    request = await ends.enqueue()
    claim = await ends.claim(ends.worker("a"))
    chances = []
    for name in ("b", "c"):
        worker = ends.worker(name)
        claim = await ends.take_over(worker, claim)
        assert await worker.begin(claim)
        chances.append(claim.is_last_chance)
    await ends.let_lease_run_out(claim)

    assert await ends.worker("d").reclaim(1) == []

    assert chances == [False, True]
    [failed] = await ends.next_events()
    assert isinstance(failed, Failed)
    assert failed.code is ErrorCode.REQUEST_KILLS_WORKERS
    late = await ends.enqueue()
    await ends.redis.hset(ends.keys.request(MODEL, late.id), "deadline_ms", 1)
    assert await ends.worker("d").read(1, 1.0) == []
    [(_, dead)] = await ends.redis.xrange(ends.keys.dead(MODEL))
    assert dead == {
        b"id": request.id.encode(),
        b"reason": b"kills_workers",
        b"attempt": b"4",
        b"worker": b"d",
    }


async def test_a_read_whose_reply_was_lost_is_found_without_a_crash_count(ends, far, proxy):
    worker = far.worker("a", unknown_after_s=0.001)
    await ends.enqueue()
    await ends.claim(worker)  # teaches Redis the script
    request = await ends.enqueue()
    proxy.drop_next_reply(after=b"XREADGROUP")

    with pytest.raises(QueueUnavailable):
        await worker.read(1, 1.0)
    assert await ends.redis.hget(ends.keys.request(MODEL, request.id), "state") == b"running"
    await asyncio.sleep(0.005)

    [claim] = await worker.reconcile()

    assert call_of(claim) == request
    assert (claim.attempt, claim.failures) == (2, 0)


async def test_the_next_read_brings_what_an_earlier_one_lost(ends):
    worker = ends.worker("a")
    await worker.create_group()
    assert await worker.read(1, 0.001) == []
    requests = [await ends.enqueue() for _ in range(2)]
    await ends.redis.xreadgroup(GROUP, "a", {ends.keys.queue(MODEL): ">"}, count=1)

    claims = await worker.read(8, 1.0)

    assert [call_of(claim) for claim in claims] == requests
    assert {(claim.attempt, claim.failures) for claim in claims} == {(1, 0)}


async def test_what_is_released_wakes_a_waiting_worker_at_once(ends):
    leaving, waiting = ends.worker("a"), ends.worker("b")
    await ends.enqueue()
    claim = await ends.claim(leaving)
    await leaving.publish([publication(claim, 1, 0, make_delta(claim, 0, 5))])
    reading = asyncio.create_task(waiting.read(4, 30.0))
    await asyncio.sleep(0.02)  # lets it block; nothing depends on it

    assert await leaving.release([claim]) == 1

    [later] = await asyncio.wait_for(reading, 15.0)
    assert tokens_of(later) == (5,)
    assert (later.attempt, later.failures) == (2, 0)
    after = await leaving.publish([publication(claim, 2, 1, make_delta(claim, 1, 6))])
    assert after == {claim.id: "fenced"}


async def test_a_worker_that_leaves_gives_back_what_it_read_but_never_claimed(ends):
    leaving, other = ends.worker("a"), ends.worker("b")
    await leaving.create_group()
    request = await ends.enqueue()
    await ends.redis.xreadgroup(GROUP, "a", {ends.keys.queue(MODEL): ">"})
    await asyncio.sleep(0.005)

    await leaving.leave()

    [claim] = await other.read(1, 1.0)
    assert call_of(claim) == request
    consumers = await ends.redis.xinfo_consumers(ends.keys.queue(MODEL), GROUP)
    assert b"a" not in {consumer["name"] for consumer in consumers}


async def test_a_claim_interrupted_by_a_stop_is_released_without_a_crash_count(ends, far, proxy):
    leaving, other = far.worker("a"), ends.worker("b")
    await leaving.create_group()
    requests = [await ends.enqueue() for _ in range(3)]
    [running] = await leaving.read(1, 1.0)
    is_claimed = proxy.drop_next_reply(after=b"XREADGROUP", hang_up=False)
    reading = asyncio.create_task(leaving.read(8, 1.0))
    await asyncio.wait_for(is_claimed.wait(), 5.0)
    reading.cancel()
    await asyncio.wait([reading])

    await leaving.leave(keep=[running])

    later = await other.read(8, 1.0)
    assert [call_of(claim) for claim in later] == requests[1:]
    assert {(claim.attempt, claim.failures) for claim in later} == {(2, 0)}
    assert await leaving.renew([running]) == {}


async def test_a_takeover_interrupted_by_a_stop_still_counts_the_crash_of_the_lost_worker(ends):
    lost, leaving, other = ends.worker("a"), ends.worker("b"), ends.worker("c")
    await ends.enqueue()
    claim = await ends.claim(lost)
    # The entry changed hands, but the stop came before the claim.
    await ends.redis.xclaim(ends.keys.queue(MODEL), GROUP, "b", 0, [claim.entry_id])

    await leaving.leave()

    [later] = await other.read(1, 1.0)
    assert (later.attempt, later.failures) == (2, 1)


async def test_entries_that_are_no_waiting_request_are_removed_and_told(ends, caplog):
    worker = ends.worker("a")
    await worker.create_group()
    await ends.redis.xadd(ends.keys.queue(MODEL), {"song": "la"})
    await ends.redis.xadd(ends.keys.queue(MODEL), {"id": b"\xff"})
    await ends.redis.xadd(ends.keys.queue(MODEL), {"id": "nobody"})
    request = await ends.enqueue()
    await ends.redis.xadd(ends.keys.queue(MODEL), {"id": request.id})  # a second time

    [claim] = await worker.read(8, 1.0)

    assert call_of(claim) == request
    assert await ends.num_open() == 1
    assert (await ends.redis.xpending(ends.keys.queue(MODEL), GROUP))["pending"] == 1
    assert "song" in caplog.text


async def test_a_consumer_that_holds_entries_is_never_forgotten(ends):
    worker = ends.worker("a")
    await ends.enqueue()
    await ends.claim(worker)

    await worker.entries.reap("a")

    consumers = await ends.redis.xinfo_consumers(ends.keys.queue(MODEL), GROUP)
    assert [consumer["name"] for consumer in consumers] == [b"a"]


async def test_a_lease_is_lost_when_redis_lost_the_request(ends):
    worker = ends.worker("a")
    request = await ends.enqueue()
    claim = await ends.claim(worker)
    await ends.redis.delete(ends.keys.request(MODEL, request.id))

    gone = {request.id: "gone"}
    assert gone in [await worker.renew([claim]) for _ in range(CHECK_EVERY)]
    assert await worker.renew([claim]) == gone
    assert await worker.publish([publication(claim, 1, 0, make_delta(claim, 0, 5))]) == gone
    assert await worker.publish([publication(claim, 2, 0, make_finished(claim))]) == gone
    assert await ends.num_open() == 0


async def test_a_claim_that_redis_lost_is_fenced_while_its_entry_is_still_the_workers(ends):
    """A replica had the delivery of the entry, and not the claim: another attempt runs the request."""
    worker = ends.worker("a", unknown_after_s=0.0)
    request = await ends.enqueue()
    claim = await ends.claim(worker)
    key = ends.keys.request(MODEL, request.id)
    await ends.redis.hdel(key, "claim", "worker", "begun")
    await ends.redis.hset(key, mapping={"state": "queued", "attempt": "0"})

    fenced = {request.id: "fenced"}
    assert fenced in [await worker.renew([claim]) for _ in range(CHECK_EVERY)]
    assert await worker.renew([claim]) == fenced
    [again] = await worker.reconcile()
    assert call_of(again) == request


async def test_a_request_that_its_worker_claims_again_is_its_own_by_the_later_attempt(ends):
    worker = ends.worker("a", unknown_after_s=0.0)
    await ends.enqueue()
    claim = await ends.claim(worker)
    later = await ends.take_over(worker, claim)

    assert await worker.renew([claim]) == {claim.id: "fenced"}
    delta = publication(claim, 1, 0, make_delta(claim, 0, 5))
    assert await worker.publish([delta]) == {claim.id: "fenced"}
    for _ in range(2):  # the first may rely on the last renewal
        assert await worker.reconcile() == []
    assert await worker.renew([later]) == {}


async def test_leases_are_renewed_at_intervals(ends, clock):
    worker = ends.worker("a", lease_s=10.0)
    await ends.enqueue()
    claim = await ends.claim(worker)
    assert await worker.renew([claim]) == {}

    for pause_s, is_renewed in ((1.0, False), (2.0, True)):
        clock.pass_time(pause_s)
        await set_lease(ends, claim, "a", 9000)
        assert await worker.renew([claim]) == {}
        owner, age_ms = await lease_of(ends, claim)
        assert owner == b"a"
        assert (age_ms < 9000) == is_renewed


async def test_a_heartbeat_between_renewals_names_requests_that_were_cancelled_or_taken_over(
    ends, clock
):
    worker = ends.worker("a")
    for _ in range(4):
        await ends.enqueue()
    await worker.create_group()
    cancelled, taken, failed, kept = claims = await worker.read(4, 1.0)
    for _ in range(2):  # the first call lists all entries
        assert await worker.renew(claims) == {}

    await ends.queue.cancel(MODEL, [cancelled.id])
    await ends.take_over(ends.worker("b"), taken)
    expected = {cancelled.id: "cancelled", taken.id: "fenced"}
    assert await worker.renew([]) == {}  # these claims were not known to the worker's loop yet
    assert await worker.renew(claims) == expected

    await ends.queue.fail_all(MODEL, ErrorCode.WORKER_LOST, "gone")
    assert await worker.renew([failed, kept]) == {failed.id: "ended", kept.id: "ended"}


async def test_a_heartbeat_between_renewals_costs_the_same_for_one_request_and_for_many(
    ends, clock
):
    sent = []
    for name, num_requests in (("a", 1), ("b", 50)):
        worker = ends.worker(name)
        for _ in range(num_requests):
            await ends.enqueue()
        await worker.create_group()
        claims = await worker.read(num_requests, 1.0)
        for _ in range(2):
            assert await worker.renew(claims) == {}
        before = await sent_bytes(ends)
        assert await worker.renew(claims) == {}
        sent.append(await sent_bytes(ends) - before)
    assert len(claims) == 50
    assert sent[1] < sent[0] + 100


async def sent_bytes(ends) -> int:
    return (await ends.redis.info("stats"))["total_net_output_bytes"]


async def test_the_commands_of_a_heartbeat_share_writes(ends, clock):
    worker = ends.worker("a")
    await ends.enqueue()
    claims = [await ends.claim(worker)]
    await worker.renew(claims)
    await worker.reconcile()

    async def renew() -> None:
        await asyncio.gather(worker.renew(claims), worker.cancel_deserted(claims))

    async def reconcile() -> None:
        await asyncio.gather(worker.reconcile(), worker.take_scan(1.0))

    for work in (renew, reconcile):
        num_writes = []
        for _ in range(5):  # the mailbox writes now and then
            before = await received_writes(ends)
            await work()
            num_writes.append(await received_writes(ends) - before - 1)
        assert min(num_writes) == 1


async def received_writes(ends) -> int:
    return (await ends.redis.info("stats"))["total_reads_processed"]


@pytest.mark.parametrize("gap", ["deleted", "trimmed", "restored"])
async def test_a_gap_in_the_wakeups_of_a_worker_hides_no_lost_request(ends, clock, gap):
    """`restored`: a replica without the last wakeups became the primary, and its clock is slow."""
    worker = ends.worker("a")
    await ends.enqueue()
    claim = await ends.claim(worker)
    stream = ends.keys.wakeups(MODEL, "a")
    for _ in range(2):
        assert await worker.renew([claim]) == {}

    if gap != "trimmed":
        await ends.redis.delete(stream)
    if gap == "restored":
        await ends.redis.xgroup_create(stream, GROUP, mkstream=True)
        await ends.redis.xadd(stream, {"id": "another"}, id="1-1")
        await ends.redis.expire(stream, 10)
    await ends.queue.cancel(MODEL, [claim.id])
    if gap == "trimmed":
        await ends.redis.xtrim(stream, maxlen=0, approximate=False)
    if gap == "deleted":
        await ends.redis.xgroup_create(stream, GROUP, mkstream=True)

    assert await worker.renew([claim]) == {claim.id: "cancelled"}


async def test_a_stream_of_wakeups_that_no_worker_reads_is_not_created(ends):
    worker = ends.worker("a")
    await ends.enqueue()
    await worker.create_group()
    [claim] = await worker.take(1)
    await ends.queue.cancel(MODEL, [claim.id])

    assert await worker.renew([claim]) == {claim.id: "cancelled"}
    assert not await ends.redis.exists(ends.keys.wakeups(MODEL, "a"))


async def test_a_takeover_in_the_middle_of_a_renewal_stands(ends, clock, monkeypatch):
    worker, other = ends.worker("a"), ends.worker("b")
    await ends.enqueue()
    claim = await ends.claim(worker)
    assert await worker.renew([claim]) == {}
    clock.pass_time(3.0)
    lost = worker.entries.lost

    async def lost_before_the_takeover():
        found = await lost()
        await ends.take_over(other, claim)
        return found

    monkeypatch.setattr(worker.entries, "lost", lost_before_the_takeover)
    assert await worker.renew([claim]) == {claim.id: "fenced"}
    assert (await lease_of(ends, claim))[0] == b"b"


async def test_an_entry_that_an_earlier_owner_took_back_returns_to_the_attempt_that_runs(ends):
    """A command of a worker that was stopped reached Redis after the takeover."""
    first, second = ends.worker("a"), ends.worker("b")
    await ends.enqueue()
    claim = await ends.claim(first)
    later = await ends.take_over(second, claim)
    await set_lease(ends, claim, "a", 0)

    assert await second.renew([later]) == {}
    assert (await lease_of(ends, claim))[0] == b"b"
    assert await first.renew([claim]) == {claim.id: "fenced"}
    assert await second.publish([publication(later, 1, 0, make_finished(later))]) == {}


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Also: requests are not all checked now and then."""
    clock = Clock()
    monkeypatch.setattr("shared.queue.worker.time", clock)
    monkeypatch.setattr("shared.queue.worker.CHECK_EVERY", 10**9)
    return clock


async def set_lease(ends, claim: Claim, owner: str, age_ms: int) -> None:
    entry = [claim.entry_id]
    await ends.redis.xclaim(
        *(ends.keys.queue(MODEL), GROUP, owner, 0, entry), idle=age_ms, justid=True
    )


async def lease_of(ends, claim: Claim) -> tuple[bytes, int]:
    """The owner of an entry, and its idle time in ms."""
    queue = ends.keys.queue(MODEL)
    [found] = await ends.redis.xpending_range(queue, GROUP, claim.entry_id, claim.entry_id, 1)
    return found["consumer"], found["time_since_delivered"]


async def test_a_crash_names_the_tenants_whose_requests_ran(ends):
    for name in ("a", "a", "b"):
        await ends.enqueue(make_request(tenant=name))
    worker, other = ends.worker("w"), ends.worker("v")
    await worker.create_group()
    held = await worker.read(2, 1.0)
    [last] = await other.read(1, 1.0)
    assert await ends.queue.crash_tenants(MODEL, "w") == {"a"}
    assert await ends.queue.crash_tenants(MODEL, "unknown") == frozenset()
    await worker.release([held[0]], is_crash=True)
    await worker.publish([publication(held[1], 1, 0, make_finished(held[1]))])
    assert await ends.queue.crash_tenants(MODEL, "w") == {"a"}
    await other.release([last])
    assert await ends.queue.crash_tenants(MODEL, "v") == frozenset()
    for key in await ends.redis.keys(f"{ends.prefix}:*"):
        assert await ends.redis.ttl(key) > 0


async def test_a_crash_names_the_tenant_of_a_request_that_was_cancelled_just_before(ends):
    worker = ends.worker("w")
    running = await ends.enqueue(make_request(tenant="a"))
    await worker.create_group()
    await worker.read(1, 1.0)
    waiting = await ends.enqueue(make_request(tenant="b"))
    await ends.queue.cancel(MODEL, [running.id, waiting.id])
    assert await ends.queue.crash_tenants(MODEL, "w") == {"a"}
