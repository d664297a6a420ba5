"""A worker in the test's process, with a real Redis, real loops, and a mock engine that the test controls."""

import asyncio
from functools import partial
from hashlib import sha256
from io import BytesIO
from unittest.mock import AsyncMock, Mock

import pytest
from PIL import Image

import shared.queue.worker
from shared.blobs.redis_store import RedisBlobStore
from shared.protocol import (
    Call,
    ChatMessage,
    ErrorCode,
    Failed,
    Finished,
    ImagePart,
    ImageRef,
    Priority,
    SamplingParams,
    TextPart,
    Tokens,
    encode,
)
from shared.queue.api import CLEARED_AFTER_TOKENS, QueueUnavailable
from shared.queue.keys import GROUP
from shared.queue.registry import Registry
from shared.queue.worker import OVERTAKES_PER_AGED
from tests.factories_queue import MODEL, events_of, make_request
from tests.factories_worker import Answers, run_worker, token_ids
from tests.rounds import in_one_round
from tests.waiting import until, until_equal
from worker.engine_thread import EngineBroken

LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
SLOW = {"decode_s": 0.01, "num_output_tokens": 200}


def make_image(colour: str = "red") -> tuple[bytes, ImageRef]:
    buffer = BytesIO()
    Image.new("RGB", (8, 8), colour).save(buffer, "PNG")
    data = buffer.getvalue()
    return data, ImageRef(sha256(data).hexdigest(), len(data), "image/png", 8, 8, param=colour)


async def test_the_error_of_an_invalid_request_has_a_code_and_a_field(ends, answers):
    _, missing = make_image("blue")
    data, good = make_image()
    junk = b"no image"
    broken = ImageRef(sha256(junk).hexdigest(), len(junk), "image/png", 8, 8, param="input.[0].url")
    store = RedisBlobStore(ends.redis, ends.prefix)
    for content in (data, junk):
        await store.put(content, "request", ttl_s=60)
    two_images = (
        ChatMessage("system", (TextPart("look"),)),
        ChatMessage("user", (ImagePart(0), TextPart("and"), ImagePart(1))),
    )
    second = make_request(images=(good, broken), messages=two_images)
    biased = make_request(sampling=SamplingParams(logit_bias={10**9: 1.0}))
    stopped = make_request(sampling=SamplingParams(stop=("a",) * 99))
    cases = [
        (make_request(images=(missing,)), ErrorCode.IMAGE_UNAVAILABLE, "blue"),
        (make_request(images=(broken,)), ErrorCode.INVALID_IMAGE, broken.param),
        (second, ErrorCode.INVALID_IMAGE, broken.param),
        (make_request("x" * 20_000), ErrorCode.CONTEXT_LENGTH_EXCEEDED, "messages"),
        (biased, ErrorCode.INVALID_REQUEST, "logit_bias"),
        (stopped, ErrorCode.INVALID_REQUEST, None),
    ]
    registry = Registry(ends.redis, ends.prefix)

    async def counts() -> tuple[int, int]:
        await running.worker.announce_first()
        [record] = await registry.workers()
        return record.num_finished, record.num_failed

    async with run_worker(ends) as running:
        for request, code, param in cases:
            [failed] = await answers.end(await ends.enqueue(request))
            assert isinstance(failed, Failed)
            assert failed.code is code
            assert failed.param == param
            assert failed.message
        assert isinstance((await answers.end(await ends.enqueue()))[-1], Finished)
        running.engine.prepare = Mock(side_effect=RuntimeError("a bug"))
        assert (await answers.end(await ends.enqueue()))[0].code is ErrorCode.ENGINE_FAILURE
        await until_equal(counts, (1, 1))  # only failures of the version count
    assert await ends.num_open() == 0
    await store.close()
    await registry.close()


async def test_a_worker_claims_no_more_than_its_engine_can_run(ends):
    async with run_worker(ends, max_num_seqs=2) as running:
        running.engine.gate.clear()
        for _ in range(5):
            await ends.enqueue()
        await until(lambda: len(running.worker.active_requests) == 2)
        await asyncio.sleep(0.1)  # several times the interval of the claim loop
        pending = await ends.redis.xpending(ends.keys.queue(MODEL), GROUP)
        assert pending["pending"] == 2


async def test_a_cancelled_request_leaves_the_engine_within_two_steps_and_a_second(ends, answers):
    """P7."""
    step_s = 0.3
    async with run_worker(ends, mock={**SLOW, "decode_s": step_s}) as running:
        request = await ends.enqueue(make_request(sampling=LONG))
        await answers.tokens(request, 3)

        await ends.queue.cancel(MODEL, [request.id])
        await until(
            lambda: not running.engine.has_work() and len(running.worker.active_requests) == 0,
            2 * step_s + 1.0,
        )
        assert running.engine.aborted


async def test_requests_of_a_gateway_that_is_gone_are_cancelled(ends, answers, monkeypatch):
    monkeypatch.setattr(shared.queue.worker, "GONE_AFTER_S", 0.2)
    async with run_worker(ends, mock=SLOW) as running:
        deserted = await ends.enqueue(make_request(reply_to="gone", sampling=LONG))
        detached = make_request(reply_to="gone", sampling=LONG, is_resumable=True)
        await ends.enqueue(detached)
        observed = await ends.enqueue(make_request(sampling=LONG))
        await until(lambda: bool(running.engine.aborted))
        assert isinstance((await answers.end(observed))[-1], Finished)
        key = ends.keys.request(MODEL, detached.id)
        await until_equal(lambda: ends.redis.hget(key, "state"), b"finished")
    assert (await ends.queue.state(MODEL, deserted.id)).state == "cancelled"
    assert [each.partition("@")[0] for each in running.engine.aborted] == [deserted.id]


async def test_requests_of_a_stopped_worker_continue_on_another_immediately(ends, answers):
    async with run_worker(ends, "first", mock=SLOW, drain_s=0.0) as first:
        request = await ends.enqueue(make_request(sampling=LONG))
        await answers.tokens(request, 3)
        async with run_worker(ends, "second"):
            await first.stop()
            async with asyncio.timeout(8.0):  # shorter than the lease of ten seconds
                events = await answers.end(request)
    assert isinstance(events[-1], Finished)
    assert len(token_ids(events)) == 200
    assert (await ends.queue.state(MODEL, request.id)).attempt == 2


async def test_a_broken_engine_fails_no_request(ends, answers):
    async with run_worker(ends, "first", mock=SLOW) as first:
        request = await ends.enqueue(make_request(sampling=LONG))
        await answers.tokens(request, 2)
        first.engine.error = RuntimeError("device lost")
        with pytest.raises(EngineBroken, match="device lost"):
            await first.task

    async with run_worker(ends, "second"):
        events = await answers.end(request)
    assert isinstance(events[-1], Finished)
    assert len(token_ids(events)) == 200


async def test_a_wedged_engine_loses_its_lease(ends, answers):
    async with run_worker(ends, "wedged", lease_s=0.6, watchdog_s=0.2, mock=SLOW) as wedged:
        request = await ends.enqueue(make_request(sampling=LONG))
        await answers.tokens(request, 2)
        wedged.engine.gate.clear()
        async with run_worker(ends, "healthy", lease_s=0.6):
            events = await answers.end(request)
            assert isinstance(events[-1], Finished)
            assert len(token_ids(events)) == 200
            wedged.engine.gate.set()
            await until(lambda: len(wedged.worker.active_requests) == 0)
    assert len(token_ids(answers.events[request.id])) == 200


async def test_a_step_of_a_lost_claim_publishes_nothing_under_the_next_one(
    ends, answers, monkeypatch
):
    """The replica that became the primary lacked the claim, so the number of the attempt is used again."""
    monkeypatch.setattr(shared.queue.worker, "CHECK_EVERY", 2)
    async with run_worker(ends, mock=SLOW) as running:
        running.engine.gate.clear()
        request = await ends.enqueue(make_request(sampling=LONG))
        await until(lambda: bool(running.engine.added))
        [lost] = running.worker.active_requests.all()
        key = ends.keys.request(MODEL, request.id)
        await ends.redis.hdel(key, "claim", "worker", "begun")
        await ends.redis.hset(key, mapping={"state": "queued", "attempt": "0"})
        await until(lambda: {*running.worker.active_requests.all()} - {lost})
        running.engine.gate.set()
        await answers.end(request)
    assert len(token_ids([*await events_of(ends.queue, request.id)])) == 200


async def test_requests_of_a_shard_that_was_down_continue_on_the_same_worker(ends, answers):
    async with run_worker(ends, others=("other",), lease_s=0.6, mock=SLOW) as running:
        request = await ends.enqueue(make_request(sampling=LONG))
        await answers.tokens(request, 2)
        queue = running.worker.queues[""]
        renew, queue.renew = queue.renew, AsyncMock(side_effect=QueueUnavailable("down"))
        await answers.wait_for(request, lambda events: events[-1].attempt == 2)
        queue.renew = renew
        assert len(token_ids(await answers.end(request))) == 200


@in_one_round
async def test_a_step_longer_than_the_lease_loses_nothing(ends, answers):
    lease_s = 0.6
    slow_step = {"decode_s": 1.5 * lease_s, "num_output_tokens": 3}
    sampling = SamplingParams(max_tokens=3, temperature=0.0)
    options = {"lease_s": lease_s, "max_num_seqs": 2, "mock": slow_step}
    async with run_worker(ends, "a", **options) as a, run_worker(ends, "b", **options) as b:
        requests = [await ends.enqueue(make_request(sampling=sampling)) for _ in range(3)]
        for request in requests:
            events = await answers.end(request)
            assert isinstance(events[-1], Finished)
            assert {event.attempt for event in events} == {1}
        assert a.worker.queues[""].num_fenced == b.worker.queues[""].num_fenced == 0


async def test_a_request_on_its_last_attempt_runs_alone(ends, answers):
    suspect = await ends.enqueue()
    claim = await ends.claim(ends.worker("victim"))
    async with run_worker(ends, mock=SLOW, max_attempts=2) as running:
        bystander = await ends.enqueue(make_request(sampling=LONG))
        await answers.tokens(bystander, 1)
        await ends.let_lease_run_out(claim)
        await until(
            lambda: suspect.id in {f.request_id for f in running.worker.active_requests.all()}
        )
        later = await ends.enqueue()
        for request in (bystander, suspect, later):
            assert isinstance((await answers.end(request))[-1], Finished)

    order = [added.request_id.partition("@")[0] for added in running.engine.added]
    place = order.index(suspect.id)
    assert order[0] == bystander.id
    assert running.engine.company[place:] == [0] * (3 - place)  # it shares no step


async def test_a_request_that_waits_to_run_alone_gets_no_crash_count(ends, answers):
    """Three requests with a crash count of two run one at a time, so only the first can have crashed this worker."""
    suspects = [await ends.enqueue(make_request(sampling=LONG)) for _ in range(3)]
    claims = [await ends.claim(ends.worker("first")) for _ in suspects]
    second = ends.worker("second")
    for claim in claims:
        assert await second.begin(await ends.take_over(second, claim))
    for claim in claims:
        await ends.let_lease_run_out(claim)
    async with run_worker(ends, mock=SLOW) as running:
        await answers.tokens(suspects[0], 1)
        await running.vanish()
    judge = ends.worker("judge")
    for claim in claims:
        await ends.let_lease_run_out(claim)

    spared = await judge.reclaim(3)

    assert [claim.id for claim in spared] == [s.id for s in suspects[1:]]
    assert [claim.failures for claim in spared] == [2, 2]
    [failed] = [e for e in await answers.end(suspects[0]) if isinstance(e, Failed)]
    assert failed.code is ErrorCode.REQUEST_KILLS_WORKERS


@pytest.mark.parametrize(
    ("payload", "code", "message"),
    [
        (
            encode(make_request()).replace(
                b'"task":{', b'"task":{"extra":' + b"[" * 5000 + b"]" * 5000 + b",", 1
            ),
            ErrorCode.INVALID_REQUEST,
            "the worker cannot read the request",
        ),
        (
            b'{"request_id":"r-0","reply_to":"g","model":"tiny","messages":[],"sampling":{}}',
            ErrorCode.UNSUPPORTED_VERSION,
            "the gateway speaks protocol 1, the worker 2: update the gateway",
        ),
    ],
)
async def test_a_call_that_cannot_be_read_fails_with_the_reason_and_is_remembered(
    ends, answers, payload, code, message
):
    request = await ends.enqueue()
    await ends.redis.hset(ends.keys.request(MODEL, request.id), "payload", payload)
    async with run_worker(ends):
        [failed] = await answers.end(request)
    assert (failed.code, failed.message) == (code, message)
    assert await ends.redis.xlen(ends.keys.dead(MODEL)) == 1


# Batch requests


def asking(num_tokens: int, priority: Priority = Priority.INTERACTIVE) -> Call:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return make_request(sampling=sampling, priority=priority)


batch = partial(asking, priority=Priority.BATCH)


def ended(answers: Answers) -> list[str]:
    return [event.request_id for event in answers.order if isinstance(event, Finished)]


async def test_batch_requests_are_preempted_and_later_continued(ends, answers):
    async with run_worker(ends, max_num_seqs=2, mock=SLOW) as running:
        long = [await ends.enqueue(batch(120)) for _ in range(2)]
        for request in long:
            await answers.tokens(request, 3)
        short = [await ends.enqueue(asking(5)) for _ in range(2)]
        for request in short:
            await answers.end(request)
        assert ended(answers) == [request.id for request in short]
        assert running.engine.stats().num_preemptions >= 2
        for request in long:
            assert len(token_ids(await answers.end(request))) == 120


async def test_batch_requests_do_not_starve(ends, answers):
    """Ten clients keep one slot busy; the batch request gets it after a limited number of their requests."""
    waiting = await ends.enqueue(batch(2))

    async def ask_on() -> None:
        while waiting.id not in ended(answers):
            await answers.end(await ends.enqueue(asking(2)))

    async with (
        run_worker(ends, max_num_seqs=1, batch_age_s=0.05, mock={"decode_s": 0.002}),
        asyncio.timeout(20),
        asyncio.TaskGroup() as clients,
    ):
        for _ in range(10):
            clients.create_task(ask_on())
    assert ended(answers).index(waiting.id) >= OVERTAKES_PER_AGED


async def test_a_second_stop_ends_immediately(ends, answers):
    async with run_worker(ends, mock=SLOW, drain_s=60.0) as running:
        request = await ends.enqueue(make_request(sampling=LONG))
        await answers.tokens(request, 1)
        running.worker.stop()
        running.worker.stop()
        await asyncio.wait_for(running.task, 30.0)

    assert (await ends.queue.state(MODEL, request.id)).state == "queued"


async def test_other_requests_join_a_poison_request_once_it_is_cleared(ends, answers):
    suspects = [await ends.enqueue(make_request(sampling=LONG)) for _ in range(2)]
    claims = [await ends.claim(ends.worker("victim")) for _ in suspects]
    for claim in claims:
        await ends.let_lease_run_out(claim)
    async with run_worker(ends, mock=SLOW, max_num_seqs=2) as running:
        for suspect in suspects:
            assert isinstance((await answers.end(suspect))[-1], Finished)

    assert running.engine.company == [0, 1]
    began = answers.events[suspects[1].id][0]
    others = [e for e in answers.order if e.request_id == suspects[0].id or e is began]
    tokens_before = sum(
        len(e.token_ids) for e in others[: others.index(began)] if isinstance(e, Tokens)
    )
    assert tokens_before >= CLEARED_AFTER_TOKENS
