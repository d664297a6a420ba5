"""The contract of every call queue, tested only through its protocols.

An implementation is a parameter of `opened`, which provides a queue, its workers and its mailboxes.
`tests/shared/queue/test_queue_model.py` tests the Redis queue with any order of calls and faults.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import shared.redis.embedded
from shared.protocol import Envelope, Priority, Tokens, decode_log, seal
from shared.queue.api import (
    Claim,
    Limits,
    Mailbox,
    Publication,
    QueueRefused,
    Reservation,
    Submission,
    WorkerQueue,
)
from shared.queue.gateway import RedisMailbox
from shared.redis.client import create_redis
from shared.redis.embedded import EmbeddedRedis
from shared.settings.tree import RedisSettings
from tests.factories_queue import GATEWAY, MODEL, Ends, make_request, open_ends
from tests.waiting import until

MAX_ATTEMPTS = 3
WITHIN_S = 20.0


@pytest.fixture(scope="module")
def redis_url(redis_program: Path) -> Iterator[str]:
    """A server of each installed Redis program."""
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="vlm-queue-") as folder,
    ):
        patch.setattr(shared.redis.embedded, "find_redis_server", lambda: redis_program)
        server = EmbeddedRedis(Path(folder))
        yield server.start()
        server.stop()


@pytest.fixture
async def opened(redis_url: str, redis_prefix: str) -> AsyncIterator[Ends]:
    """A queue with an open mailbox for `GATEWAY`."""
    settings = RedisSettings(url=redis_url)
    redis, blocking = create_redis(settings), create_redis(settings, blocking=True)
    async with redis, blocking, open_ends(redis, blocking, redis_prefix) as ends:
        yield ends


async def join(opened: Ends, name: str, **options: float) -> WorkerQueue:
    worker = opened.worker(name, max_attempts=MAX_ATTEMPTS, **options)
    await worker.create_group()
    return worker


def make_envelope(**changes) -> Envelope:
    return seal(make_request(**changes))._replace(payload=b"any bytes: \x00\xff")


async def submit(
    opened: Ends,
    *envelopes: Envelope,
    max_waiting: int = 100,
    num_tokens: int = 1,
    timeout_s: float = 60.0,
    **limits: int,
) -> Envelope:
    """Queues calls, by default one, with a reservation if there are limits. Returns the first one."""
    envelopes = envelopes or (make_envelope(),)
    first, names = envelopes[0], tuple(each.id for each in envelopes)
    counted = (first.model, first.tenant, names, num_tokens, 0, num_tokens)
    reservation = Reservation(*counted, Limits(**limits)) if limits else None
    await opened.queue.submit(Submission(envelopes, timeout_s, max_waiting, reservation))
    return envelopes[0]


async def refusal(opened: Ends, *envelopes: Envelope, **options) -> QueueRefused:
    with pytest.raises(QueueRefused) as refused:
        await submit(opened, *envelopes, **options)
    return refused.value


async def claim_one(worker: WorkerQueue) -> Claim:
    [claim] = await worker.read(1, 5.0)
    return claim


def tokens(claim: Claim, number: int, index: int, count: int) -> Publication:
    return Publication(claim, number, index, count, b'"%d+%d"' % (index, count))


def end(claim: Claim, number: int = 1, index: int = 0) -> Publication:
    return Publication(claim, number, index, 0, b'"end"', "finished")


async def state(opened: Ends, envelope: Envelope) -> str:
    found = await opened.queue.state(MODEL, envelope.id)
    assert found is not None
    return found.state


async def arrivals(mailbox: Mailbox, count: int) -> list[bytes]:
    """Returns the next `count` entries of a mailbox."""
    found: list[bytes] = []
    async with asyncio.timeout(WITHIN_S):
        async for model, data in mailbox.events():
            assert model == MODEL
            found.append(data)
            if len(found) == count:
                break
    return found


# Delivery


async def test_a_call_is_opaque_bytes_and_its_events_reach_the_gateway(opened):
    envelope = await submit(opened)
    worker = await join(opened, "a")
    claim = await claim_one(worker)
    assert (claim.id, claim.payload, claim.reply_to) == (
        envelope.id, envelope.payload, envelope.reply_to,
    )  # fmt: skip
    assert (claim.attempt, claim.log, claim.may_be_poison) == (1, (), False)
    assert 0 < claim.remaining_s <= 60
    assert await state(opened, envelope) == "running"

    assert await worker.publish([tokens(claim, 1, 0, 2)]) == {}
    running = await opened.queue.state(MODEL, envelope.id)
    assert (running.state, running.attempt, running.num_output_tokens) == ("running", 1, 2)
    assert await worker.publish([end(claim, 2, 2)]) == {}

    assert await arrivals(opened.mailbox, 2) == [b'["0+2"]', b'["end"]']
    assert await opened.queue.events(MODEL, envelope.id) == [b'"0+2"', b'"end"']
    assert await state(opened, envelope) == "finished"


async def test_running_calls_do_not_fill_the_queue_and_waiting_ones_keep_their_order(opened):
    first = await submit(opened, max_waiting=1)
    assert (await refusal(opened, max_waiting=1)).reason == "queue_full"
    worker = await join(opened, "a")
    assert (await claim_one(worker)).id == first.id
    later = [await submit(opened, max_waiting=3) for _ in range(3)]
    claims = await worker.read(2, 1.0) + await worker.read(2, 1.0)
    assert [claim.id for claim in claims] == [envelope.id for envelope in later]


async def test_concurrent_workers_run_every_call_once(opened):
    calls = [await submit(opened) for _ in range(30)]
    finished: list[str] = []

    async def work(worker: WorkerQueue) -> None:
        while claims := await worker.read(4, 0.2):
            await worker.publish([end(claim) for claim in claims])
            finished.extend(claim.id for claim in claims)

    await asyncio.gather(*[work(await join(opened, name)) for name in "abc"])
    assert sorted(finished) == sorted(call.id for call in calls)


async def test_a_gap_in_the_tokens_is_refused(opened):
    await submit(opened)
    worker = await join(opened, "a")
    claim = await claim_one(worker)
    assert await worker.publish([tokens(claim, 1, 3, 1)]) == {claim.id: "gap"}
    assert await worker.publish([end(claim, 1, 3)]) == {claim.id: "gap"}
    failed = Publication(claim, 1, 3, 0, b'"failed"', "failed")  # ends at any token position
    assert await worker.publish([failed]) == {}


async def test_the_choices_of_a_request_are_queued_atomically(opened):
    alone, both = [(make_envelope(), make_envelope()) for _ in range(2)]
    await submit(opened, *alone, max_waiting=1, max_tokens=1)  # a single request is never too large
    assert (await refusal(opened, *both, max_waiting=3)).reason == "queue_full"
    assert (await opened.queue.stats(MODEL)).num_open == 2
    await submit(opened, *both, max_waiting=4)
    assert (await opened.queue.stats(MODEL)).num_open == 4


async def test_an_unknown_call_has_no_state(opened):
    assert await opened.queue.state(MODEL, "unknown") is None
    assert await opened.queue.events(MODEL, "unknown") == []
    assert await opened.queue.listen(MODEL, "unknown", GATEWAY) is None


async def test_open_calls_are_listed_newest_first_with_their_workers(opened):
    first, ended = await submit(opened), await submit(opened)
    worker = await join(opened, "a")
    claim, other = await worker.read(2, 5.0)
    await worker.publish([tokens(claim, 1, 0, 2), end(other)])
    waiting = await submit(opened)
    batch = await submit(opened, make_envelope(priority=Priority.BATCH))
    assert ended.id not in await open_ids(opened, 10)
    found = await opened.queue.open_requests([MODEL, "another"], 10)
    assert [(each.id, each.worker, each.num_tokens) for each in found] == [
        (batch.id, "", 0), (waiting.id, "", 0), (first.id, "a", 2),
    ]  # fmt: skip
    assert {each.model for each in found} == {MODEL}
    assert all(0 <= each.age_s < WITHIN_S for each in found)
    assert await open_ids(opened, 2) == [batch.id, waiting.id]


async def open_ids(opened: Ends, limit: int) -> list[str]:
    return [each.id for each in await opened.queue.open_requests([MODEL], limit)]


async def test_a_call_beyond_its_deadline_fails_and_is_not_claimed(opened):
    envelope = await submit(opened, timeout_s=0.001)
    await asyncio.sleep(0.002)
    worker = await join(opened, "a")
    assert await worker.read(1, 0.01) == []
    assert await state(opened, envelope) == "failed"
    assert b"deadline_exceeded" in (await arrivals(opened.mailbox, 1))[0]
    assert (await opened.queue.stats(MODEL)).num_open == 0


# Attempts


async def test_a_later_attempt_gets_the_log_and_fences_the_earlier_one(opened):
    envelope = await submit(opened)
    first, second = await join(opened, "a"), await join(opened, "b")
    claim = await claim_one(first)
    await first.publish([tokens(claim, 1, 0, 2)])

    await opened.let_lease_run_out(claim)
    [later] = await second.reclaim(1)

    assert (later.id, later.attempt, later.log) == (envelope.id, 2, (b'"0+2"',))
    assert await first.publish([tokens(claim, 2, 2, 1)]) == {claim.id: "fenced"}
    assert await first.publish([end(claim, 2, 2)]) == {claim.id: "fenced"}
    assert await first.renew([claim]) == {claim.id: "fenced"}
    assert await first.release([claim]) == 0
    assert await first.begin(claim) is False
    assert first.num_fenced == 2
    assert await (await join(opened, "c")).reclaim(1) == []  # the second worker has the lease
    assert await second.renew([later]) == {}
    assert await second.publish([end(later, 1, 2)]) == {}
    assert await opened.queue.events(MODEL, envelope.id) == [b'"0+2"', b'"end"']


async def test_a_call_submitted_with_tokens_continues_after_them(opened):
    envelope = make_envelope()
    await opened.queue.submit(Submission([envelope], 60.0, 9, earlier=[7, 8, 9]))
    one, other = await join(opened, "one"), await join(opened, "other")
    claim = await claim_one(one)
    [event] = decode_log(claim.log)
    assert isinstance(event, Tokens)
    assert (claim.attempt, event.index, event.token_ids) == (1, 0, (7, 8, 9))
    assert await one.publish([tokens(claim, 1, 0, 1)]) == {claim.id: "gap"}
    assert await one.publish([tokens(claim, 2, 3, 1)]) == {}
    await opened.let_lease_run_out(claim)
    [again] = await other.reclaim(1)
    assert (again.attempt, again.failures, again.log) == (2, 1, (*claim.log, b'"3+1"'))


async def test_a_lost_claim_is_fenced_by_a_later_one_with_its_number(opened):
    await submit(opened)
    first, second = await join(opened, "a"), await join(opened, "b")
    claim = await claim_one(first)
    # Delete the claim, as after a failover to a replica that had not received it.
    request = opened.keys.request(MODEL, claim.id)
    await opened.redis.hdel(request, "claim", "worker", "begun")
    await opened.redis.hset(request, mapping={"state": "queued", "attempt": "0"})
    await opened.let_lease_run_out(claim)
    [later] = await second.reclaim(1)

    assert later.attempt == claim.attempt
    assert await first.publish([tokens(claim, 1, 0, 1)]) == {claim.id: "fenced"}
    assert await first.renew([claim]) == {claim.id: "fenced"}
    assert await first.begin(claim) is False
    assert await second.publish([tokens(later, 1, 0, 2)]) == {}
    assert await second.renew([later]) == {}


async def test_a_lease_expires_unless_it_is_renewed(opened):
    lost, kept = make_envelope(), make_envelope()
    await submit(opened, lost, kept)
    first, second = [await join(opened, name, lease_s=2.0) for name in "ab"]
    began_at = asyncio.get_running_loop().time()
    claims = {claim.id: claim for claim in await first.read(2, 5.0)}
    assert await second.reclaim(2) == []

    taken: list[Claim] = []
    while not taken:
        assert await first.renew([claims[kept.id]]) == {}
        taken = await second.reclaim(2)

    assert asyncio.get_running_loop().time() - began_at >= 1.99  # Redis counts whole milliseconds
    assert [claim.id for claim in taken] == [lost.id]
    assert taken[0].failures == 1
    assert await state(opened, kept) == "running"


async def test_one_worker_per_interval_scans_for_expired_leases(opened):
    workers = [await join(opened, name) for name in "abc"]
    scans = await asyncio.gather(*(each.take_scan(60.0) for each in workers))
    assert sorted(scans) == [False, False, True]
    await workers[0].end_scan()  # leases had expired, so other workers scan too
    assert await workers[1].take_scan(0.05)
    await until(lambda: workers[2].take_scan(60.0))


async def test_a_call_that_loses_its_workers_fails(opened):
    envelope = await submit(opened)
    worker = await join(opened, "a")
    claim = await claim_one(worker)
    for number in range(1, MAX_ATTEMPTS):
        assert await worker.begin(claim)
        await opened.let_lease_run_out(claim)
        worker = await join(opened, f"b{number}")
        [claim] = await worker.reclaim(1)
        assert (claim.attempt, claim.failures) == (number + 1, number)
    assert claim.is_last_chance
    assert await worker.begin(claim)
    await opened.let_lease_run_out(claim)
    assert await (await join(opened, "c")).reclaim(1) == []
    assert await state(opened, envelope) == "failed"
    assert b"request_kills_workers" in (await arrivals(opened.mailbox, 1))[0]


# Cancellation


async def test_a_cancelled_call_is_not_claimed(opened):
    waiting, running = await submit(opened), await submit(opened)
    worker = await join(opened, "a")
    await opened.queue.cancel(MODEL, [waiting.id])
    [claim] = await worker.read(2, 5.0)
    assert claim.id == running.id
    await opened.queue.cancel(MODEL, [running.id, "unknown"])
    assert await worker.renew([claim]) == {claim.id: "cancelled"}
    assert await worker.publish([end(claim)]) == {claim.id: "cancelled"}
    assert await state(opened, running) == "cancelled"


async def test_a_cancel_that_races_a_claim_leaves_nothing_that_runs(opened):
    worker = await join(opened, "a")
    for _ in range(20):
        envelope = await submit(opened)
        claims, _ = await asyncio.gather(
            worker.read(1, 0.05), opened.queue.cancel(MODEL, [envelope.id])
        )
        for claim in claims:
            assert await worker.publish([tokens(claim, 1, 0, 1)]) == {claim.id: "cancelled"}
        assert await state(opened, envelope) == "cancelled"
        assert await opened.queue.events(MODEL, envelope.id) == []
    assert (await opened.queue.stats(MODEL)).num_open == 0


# Batch requests


async def test_batch_calls_get_the_capacity_left_by_interactive_ones(opened):
    worker = await join(opened, "a")
    batch = [await submit(opened, make_envelope(priority=Priority.BATCH)) for _ in range(2)]
    stats = await opened.queue.stats(MODEL)
    assert (stats.num_open - stats.num_backlog, stats.num_backlog) in ((0, 2), (1, 2))
    interactive = await submit(opened)

    claims = await worker.read(8, 5.0)
    while not claims:  # woken by the batch request
        claims = await worker.read(8, 5.0)
    assert [claim.id for claim in claims] == [interactive.id]
    assert worker.num_backlog > 0

    taken: list[str] = []
    while len(taken) < 2:
        taken += [claim.id for claim in await worker.take(1)]
    assert taken == [envelope.id for envelope in batch]
    assert worker.num_backlog == 0


async def test_a_waiting_worker_is_woken_by_a_batch_call(opened):
    worker = await join(opened, "a")
    reading = asyncio.create_task(worker.read(1, WITHIN_S))
    await submit(opened, make_envelope(priority=Priority.BATCH))
    assert await reading == []
    assert worker.num_backlog == 1
    assert len(await worker.take(1)) == 1


async def test_batch_calls_have_a_separate_limit(opened):
    await submit(opened, make_envelope(priority=Priority.BATCH), max_waiting=1)
    full = await refusal(opened, make_envelope(priority=Priority.BATCH), max_waiting=1)
    assert full.reason == "queue_full"
    await opened.queue.cancel(MODEL, [(await submit(opened, max_waiting=2)).id])


# Limits


async def test_scarce_tokens_are_divided_fairly(opened):
    async def ask(tenant: str, num_tokens: int) -> None:
        await submit(opened, make_envelope(tenant=tenant), num_tokens=num_tokens, max_tokens=100)

    for _ in range(4):
        await ask("greedy", 10)
    await ask("modest", 5)
    await ask("greedy", 10)
    with pytest.raises(QueueRefused, match="key_share"):
        await ask("greedy", 10)
    await ask("modest", 40)


async def test_without_limits_nothing_is_counted(opened):
    await submit(opened)
    await submit(opened, num_tokens=10, max_tokens=10)
    assert (await refusal(opened, max_tokens=10)).reason == "open_tokens"


# Resumed requests


async def test_the_first_writer_of_a_record_wins(opened):
    assert await opened.records.recall("r") is None
    assert await opened.records.remember("r", b"first \xff", 60.0) is True
    assert await opened.records.remember("r", b"second", 60.0) is False
    assert await opened.records.recall("r") == b"first \xff"
    await opened.records.forget("r")
    assert await opened.records.recall("r") is None


async def test_later_events_reach_new_and_earlier_listeners(opened):
    envelope = await submit(opened)
    worker = await join(opened, "a")
    claim = await claim_one(worker)
    await worker.publish([tokens(claim, 1, 0, 1)])
    other = RedisMailbox(opened.redis_blocking, opened.prefix, "gateway-2")
    await other.open([MODEL])

    for _ in range(2):
        found = await opened.queue.listen(MODEL, envelope.id, "gateway-2")
        assert found is not None
        assert (found.state, found.num_output_tokens) == ("running", 1)
        await opened.queue.listen(MODEL, envelope.id, GATEWAY)  # repeated without effect
    await worker.publish([tokens(claim, 2, 1, 1)])
    await worker.publish([end(claim, 3, 2)])

    assert await opened.queue.events(MODEL, envelope.id) == [b'"0+1"', b'"1+1"', b'"end"']
    assert await arrivals(other, 2) == [b'["1+1"]', b'["end"]']
    await other.close()
    assert await arrivals(opened.mailbox, 3) == [b'["0+1"]', b'["1+1"]', b'["end"]']


async def test_only_failed_calls_are_forgotten_and_free_their_id(opened):
    failed, finished, queued = [await submit(opened) for _ in range(3)]
    worker = await join(opened, "a")
    claims = await worker.read(2, 0.1)
    failure = Publication(claims[0], 1, 0, 0, b'"failed"', "failed")
    await worker.publish([failure, end(claims[1])])

    for envelope in (failed, finished, queued):
        await opened.queue.forget(MODEL, envelope.id, failed_only=True)

    assert await opened.queue.state(MODEL, failed.id) is None
    assert await opened.queue.events(MODEL, failed.id) == []
    states = [await state(opened, envelope) for envelope in (finished, queued)]
    assert states == ["finished", "queued"]
    await submit(opened, failed)
    ids = {claim.id for claim in await worker.read(2, 0.1)}
    assert ids == {failed.id, queued.id}
