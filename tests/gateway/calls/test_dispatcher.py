"""Delivery of events from the mailbox to requests: order, repeats, gaps, silence, deadlines."""

import asyncio
import re
import time
from datetime import date
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.calls.dispatcher import MAX_LOOKS, Dispatcher
from gateway.calls.key_limits import Refunds
from gateway.calls.open_call import ChoiceProgress, OpenCall
from gateway.keys.usage import UsageLog, today
from shared.protocol import (
    Call,
    CallEvent,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    Started,
    Tokens,
    Usage,
    encode_events,
)
from shared.queue.api import Budget, Charge, DuplicateRequest, QueueUnavailable, Submission
from shared.queue.gateway import RedisGatewayQueue, RedisMailbox
from shared.queue.keys import RedisKeys
from shared.telemetry.metrics import GatewayMetrics
from tests.factories_gateway import MODEL, Answer, say_hello
from tests.factories_keys import code
from tests.factories_queue import GATEWAY, make_finished, make_request, publication, reserve
from tests.gateway.api.chat.test_streams import read_events
from tests.waiting import until, until_equal
from worker.active_requests import read_claim


def delta(index: int, *token_ids: int, attempt: int = 1) -> Tokens:
    return Tokens("r", attempt, index, token_ids, "".join(f" {t}" for t in token_ids))


#: An event of a request that this gateway does not follow, as a worker posts it.
UNWANTED = b"[%b]" % encode_events([delta(0, 1)])


def finished(num_tokens: int, attempt: int = 1) -> Finished:
    return Finished("r", attempt, FinishReason.STOP, Usage(1, num_tokens))


def progress_after(*events: CallEvent) -> ChoiceProgress:
    progress = ChoiceProgress("r")
    for event in events:
        progress.accept(event)
    return progress


def test_a_later_attempt_supersedes_and_no_event_follows_the_end():
    progress = progress_after(Started("r", 1, Usage(1)), delta(0, 1))
    assert progress.accept(Started("r", 2, Usage(1))) is None
    assert progress.accept(delta(1, 2, attempt=2))
    assert progress.accept(delta(2, 9, attempt=1)) is None
    assert progress.accept(finished(2, attempt=2))
    for event in (delta(2, 1), finished(2), Failed("r", 2, ErrorCode.CANCELLED, "x")):
        assert progress.accept(event) is None


def counted(index: int, num_tokens: int, attempt: int = 1) -> Tokens:
    """Returns tokens as an engine without token IDs emits them."""
    return Tokens("r", attempt, index, (), " word" * num_tokens, num_without_id=num_tokens)


def test_tokens_with_and_without_ids_are_delivered_once_in_order():
    named = [delta(0, 1), delta(0, 1), delta(1, 2, 3), delta(1, 2, 3), delta(2, 3), delta(3, 4)]
    others = [counted(0, 1), counted(0, 1), counted(1, 2), counted(2, 1), counted(3, 1)]
    for events, passed in ((named, [0, 2, 5]), (others, [0, 2, 4])):
        progress = ChoiceProgress("r")
        assert [n for n, event in enumerate(events) if progress.accept(event)] == passed
    assert progress.accept(counted(5, 1)) is None
    assert progress.has_gap
    assert progress.accept(finished(4)) is not None


@pytest.mark.parametrize(
    "overlap", [delta(0, 9, attempt=2), delta(1, 9, 3, attempt=2), counted(0, 1, attempt=2)]
)
def test_two_different_answers_are_never_spliced(overlap):
    first = [counted(0, 2)] if overlap.num_without_id else [delta(0, 1), delta(1, 2)]
    progress = progress_after(*first)
    failed = progress.accept(overlap)
    assert isinstance(failed, Failed)
    assert failed.code is ErrorCode.WORKER_LOST
    assert progress.accept(delta(2, 3)) is None


def test_an_event_with_repeated_and_new_tokens_is_computed_again():
    """After Redis lost its last writes, item boundaries can differ."""
    progress = progress_after(delta(0, 1), delta(1, 2))
    assert progress.accept(delta(0, 1, attempt=2)) is None
    assert progress.accept(delta(1, 2, 3, attempt=2)) is None
    assert progress.replay([delta(0, 1, attempt=2), delta(1, 2, 3, attempt=2)]) == []
    assert progress.is_split
    assert progress.has_gap


@pytest.mark.parametrize("event", [delta(2, 3), finished(2)])
def test_events_after_a_gap_are_held_back_until_the_log_is_read(event):
    progress = progress_after(delta(0, 1))
    assert progress.accept(event) is None
    assert progress.has_gap
    log = [Started("r", 1, Usage(1)), delta(0, 1), delta(1, 2), delta(2, 3, attempt=2)]
    events = progress.replay(log)
    assert [e.token_ids for e in events if isinstance(e, Tokens)] == [(2,), (3,)]
    assert not progress.has_gap


@pytest.fixture
def changes() -> dict[str, dict[str, Any]]:
    """Requests without events are looked up after a short time."""
    return {"gateway": {"silence_timeout_s": 0.2}}


@pytest.fixture
def mailbox_key(gateway, redis_prefix) -> str:
    """The key to which workers post events for this gateway."""
    return RedisKeys(redis_prefix).mailbox(MODEL, gateway.services.mailbox.gateway_id)


async def test_events_that_the_mailbox_lost_are_read_from_the_log(
    gateway, worker, redis, mailbox_key
):
    aside = mailbox_key + "-aside"

    async def script(answer: Answer) -> None:
        await answer.start()
        await answer.say("one ")
        assert await redis.copy(mailbox_key, aside)
        await redis.delete(mailbox_key)  # events posted now are lost
        await answer.say("two ")
        await redis.rename(aside, mailbox_key)
        await answer.finish("three")

    worker.script = script
    *chunks, done = read_events(await gateway.stream())
    assert done == "[DONE]"
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == "one two three"

    async def lose_end(answer: Answer) -> None:
        assert await redis.delete(mailbox_key)
        await answer.finish("found")

    worker.script = lose_end
    answer = (await gateway.chat()).json()
    assert answer["choices"][0]["message"]["content"] == "found"


async def forget(redis: Redis, request_id: str) -> None:
    async for key in redis.scan_iter(f"*request:{request_id}"):
        await redis.delete(key)


async def test_a_request_that_redis_forgets_each_time_ends_with_an_error(gateway, worker, redis):
    ids: list[str] = []

    async def script(answer: Answer) -> None:
        ids.append(answer.request.id)
        await forget(redis, answer.request.id)

    worker.script = script
    response = await gateway.chat()
    assert code(response)[:2] == (503, "worker_lost")
    assert response.headers["retry-after"]
    assert ids == [ids[0], *(f"{ids[0]}.{number}" for number in (1, 2, 3))]


@pytest.mark.parametrize("changes", [{"gateway": {"silence_timeout_s": 30.0}}])
async def test_a_request_that_redis_lost_is_queued_again_once_redis_is_back(gateway, worker, redis):
    """Redis answers again after a failover, but the write of the request was not replicated."""

    async def script(answer: Answer) -> None:
        if "." in answer.request.id:
            await answer.say("found")
            await answer.finish()
            return
        await forget(redis, answer.request.id)
        for client in await redis.client_list():
            if client["cmd"] == "xread":
                await redis.client_kill_filter(_id=client["id"])

    worker.script = script
    async with asyncio.timeout(10):  # before the lookup of silent requests
        response = await gateway.chat()
    assert response.json()["choices"][0]["message"]["content"] == "found"


def breaking_once(method, broken):
    """Wraps a method so that its first call fails."""

    def call(*arguments):
        if not broken:
            broken.append(arguments)
            raise RuntimeError("broken")
        return method(*arguments)

    return call


async def test_events_are_delivered_after_the_reader_failed_or_met_invalid_events(
    gateway, worker, redis, mailbox_key, monkeypatch
):
    metrics, broken = gateway.services.metrics, []
    failing = breaking_once(metrics.record_dropped_events, broken)
    monkeypatch.setattr(metrics, "record_dropped_events", failing)

    async def script(answer: Answer) -> None:
        for events in (UNWANTED, b"[{}]", b"no JSON", b"\xff"):
            await redis.xadd(mailbox_key, {"events": events})
        await say_hello(answer)

    worker.script = script
    answer = (await gateway.chat()).json()
    assert broken
    assert answer["choices"][0]["message"]["content"] == "Hello you"

    async def num_dropped() -> float:
        text = (await gateway.client.get("/metrics")).text
        return float(re.findall(r"^vlm_dropped_events_total (\S+)$", text, re.M)[0])

    before = await num_dropped()
    await redis.xadd(mailbox_key, {"events": UNWANTED})
    async with asyncio.timeout(10):
        while await num_dropped() == before:
            await asyncio.sleep(0.01)


@pytest.fixture
async def dispatcher(redis, redis_blocking, redis_prefix):
    """The dispatcher of a gateway. No worker serves the requests that it queues."""
    queue = RedisGatewayQueue(redis, redis_prefix)
    mailbox = RedisMailbox(redis_blocking, redis_prefix, GATEWAY)
    dispatcher = Dispatcher(
        queue, mailbox, GatewayMetrics(), silence_timeout_s=0.2,
        restore_budget=UsageLog(queue, None).restore_budget,
    )  # fmt: skip
    dispatcher.start()
    yield dispatcher
    await dispatcher.stop()
    await mailbox.close()
    await queue.close()


async def submit_one(dispatcher: Dispatcher, *choices: Call, **options: Any) -> OpenCall:
    return await dispatcher.submit(choices, Submission((), 60.0, 100_000, **options))


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_request_whose_tokens_redis_lost_continues_after_the_last_one(
    dispatcher, ends, redis, is_lost
):
    """Redis lost the request, or the new attempt repeats only a part of the tokens. The request is charged once."""
    call = make_request()
    budget = Budget("2026-11", most=1, reserved=9, ttl_s=600)
    charge = Charge(prices=(0.0, 0.0, 3.0, 0.0), budget=budget)
    reservation = reserve(call, num_tokens=90, max_tenant_tokens_per_minute=1)
    opened = await submit_one(dispatcher, call, charge=charge, reservation=reservation)
    opened.deliver(opened.choices[0], delta(0, 1, 2))
    if is_lost:
        await redis.delete(ends.keys.request(MODEL, call.id), ends.keys.queue(MODEL))
    else:
        opened.deliver(opened.choices[0], delta(1, 2, 3, attempt=2))
    await until(lambda: opened.resubmitted)
    worker = ends.worker("w")
    await worker.create_group()
    [claim] = await worker.read(10, 5.0)
    _, events = read_claim(claim)
    assert claim.id == f"{call.id}.1"
    assert [event.token_ids for event in events] == [(1, 2)]
    news = Tokens(claim.id, claim.attempt, 2, (3,), "three"), make_finished(claim, 3)
    await worker.publish([publication(claim, 1, 2, *news)])
    await until(lambda: opened.choices[0].is_finished)
    assert opened.choices[0].token_ids == [1, 2, 3]

    async def is_cancelled() -> bool:
        state = await dispatcher.queue.state(MODEL, call.id)
        return state is None or state.state == "cancelled"

    await until(is_cancelled)
    [sums] = await dispatcher.queue.usage((today() - date(1970, 1, 1)).days, skips_down=False)
    counted = [sums[f"{kind} {call.tenant} {MODEL}"] for kind in ("requests", "output", "cost")]
    assert counted == [1, 3, 9]
    found = await redis.hgetall(ends.keys.budget(call.tenant, budget.period))
    assert int(found[b"spent"]) == 9
    # If Redis does not have the call any more, its reservation stays until it expires.
    assert int(found[b"reserved"]) == (9 if is_lost else 0)
    refunds = Refunds(dispatcher.queue)
    refunds.add(reservation, opened)
    await refunds.refund()
    full_at = float(await redis.hget(ends.keys.rates(MODEL, call.tenant), "tokens")) / 1000
    minutes = (full_at - time.time()) / 60
    assert minutes == pytest.approx(91 if is_lost else 1, abs=0.5)


async def test_calls_of_a_shard_that_is_down_delay_no_lookup_of_others(dispatcher, monkeypatch):
    """More resumable calls wait for their shard than one lookup reads."""
    waiting = [make_request(id=f"{n}-0@b", is_resumable=True) for n in range(MAX_LOOKS + 2)]
    for call in waiting:
        await submit_one(dispatcher, call)
    opened = await submit_one(dispatcher, make_request(id="lost-0@a"))

    async def state(model: str, request_id: str) -> None:
        if request_id.endswith("@b"):
            raise QueueUnavailable("down")

    monkeypatch.setattr(dispatcher.queue, "state", state)
    await until(lambda: opened.resubmitted)


async def test_the_id_of_an_open_request_is_refused(dispatcher):
    request = make_request(is_resumable=True)
    first = await submit_one(dispatcher, request)
    with pytest.raises(DuplicateRequest):
        await submit_one(dispatcher, request)
    dispatcher.fail_all("The first is still known.")
    assert await first.receive(timeout_s=5.0)
    assert dispatcher.has_open(request.model)


async def test_cancellations_are_retried_in_bounded_batches(dispatcher, monkeypatch):
    sizes: list[int] = []
    num_running, most_running = 0, 0
    cancel, num_failures = dispatcher.queue.cancel, 4

    async def count(model: str, request_ids: list[str], *, is_lost: bool) -> None:
        nonlocal num_running, most_running, num_failures
        num_running += 1
        most_running = max(most_running, num_running)
        sizes.append(len(request_ids))
        try:
            await asyncio.sleep(0)
            if num_failures:
                num_failures -= 1
                raise QueueUnavailable("too much at once")
            await cancel(model, request_ids, is_lost=is_lost)
        finally:
            num_running -= 1

    monkeypatch.setattr(dispatcher.queue, "cancel", count)
    choices = [[make_request() for _ in range(16)] for _ in range(125)]
    for open_call in [await submit_one(dispatcher, *each) for each in choices]:
        open_call.close()

    async def num_open() -> int:
        return (await dispatcher.queue.stats(MODEL)).num_open

    await until_equal(num_open, 0)
    assert max(sizes) <= 500
    assert most_running == 1


async def test_events_received_during_a_replay_can_be_newer_than_the_log():
    progress = progress_after(delta(2, 3), finished(3))  # held back until the log is read
    log = [Started("r", 1, Usage(1)), delta(0, 1), delta(1, 2)]
    progress.replay(log)
    assert progress.has_gap
    progress.replay([*log, delta(2, 3)])
    assert progress.has_gap
    [end] = progress.replay([*log, delta(2, 3), finished(3)])
    assert isinstance(end, Finished)
    assert not progress.has_gap


async def test_an_unreadable_log_ends_only_its_request(gateway, worker, redis):
    async def script(answer: Answer) -> None:
        await answer.start()
        if len(worker.answers) == 1:
            async for key in redis.scan_iter(f"*log:{answer.request.id}"):
                await redis.rpush(key, b"nonsense")
        else:
            await asyncio.sleep(0.5)  # long enough to be looked up
            await answer.finish("fine")

    worker.script = script
    response = await gateway.chat()
    assert code(response)[:2] == (503, "worker_lost")
    assert (await gateway.chat()).status_code == 200


async def test_an_event_that_raises_ends_only_its_request(gateway, worker, monkeypatch):
    def refuse(self, event):
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(ChoiceProgress, "accept", refuse)
        assert (await gateway.chat()).json()["error"]["code"] == "worker_lost"
    assert (await gateway.chat()).status_code == 200


@pytest.mark.parametrize("changes", [{"gateway": {"request_timeout_s": 0.3}}])
async def test_deadlines_are_enforced_after_an_error_in_their_task(gateway, worker, monkeypatch):
    broken = []
    monkeypatch.setattr(OpenCall, "fail", breaking_once(OpenCall.fail, broken))
    worker.script = lambda answer: asyncio.sleep(0)
    assert (await gateway.chat()).json()["error"]["code"] == "deadline_exceeded"
    assert broken


async def test_a_lost_request_whose_client_left_is_not_submitted_again(
    dispatcher, monkeypatch, caplog
):
    left, other = [await submit_one(dispatcher, make_request()) for _ in range(2)]

    async def lose(model: str, request_id: str) -> None:
        left.close()

    monkeypatch.setattr(dispatcher.queue, "state", lose)
    await until(lambda: len(other.resubmitted) == 2)  # its second lookup
    assert not left.resubmitted
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
