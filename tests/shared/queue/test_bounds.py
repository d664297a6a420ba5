"""Limits across all gateways, on a real server: which requests are refused, the reason, and the wait."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
from redis.asyncio import Redis

import shared.queue.worker
from shared.protocol import SamplingParams, seal
from shared.queue.api import Budget, Charge, QueueRefused, Submission, UnknownBudget
from shared.queue.gateway import RedisGatewayQueue
from tests.factories_queue import (
    MODEL,
    enqueue,
    make_delta,
    make_finished,
    make_request,
    publication,
    reserve,
)
from tests.rounds import in_one_round


@pytest.fixture
async def gateways(redis: Redis, redis_prefix: str) -> AsyncIterator[list[RedisGatewayQueue]]:
    """Three gateways that share only Redis."""
    queues = [RedisGatewayQueue(redis, redis_prefix) for _ in range(3)]
    yield queues
    for queue in queues:
        await queue.close()


async def refusal(queue: RedisGatewayQueue, **options) -> QueueRefused:
    tenant = options.pop("tenant", "")
    with pytest.raises(QueueRefused) as refused:
        await enqueue(queue, make_request(tenant=tenant), **options)
    return refused.value


async def admit_all(gateways: list[RedisGatewayQueue], count: int, **options) -> list[str]:
    """Submits `count` requests at each gateway concurrently; returns the reasons of the refusals."""
    answers = await asyncio.gather(
        *(enqueue(q, make_request(), **options) for q in gateways for _ in range(count)),
        return_exceptions=True,
    )
    return [answer.reason for answer in answers if isinstance(answer, QueueRefused)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_waiting": 4}, "queue_full"),
        ({"max_tokens": 40, "num_tokens": 10}, "open_tokens"),
        ({"max_tenant_requests": 4}, "key_open"),
        ({"max_tenant_requests_per_minute": 4}, "key_requests"),
        ({"max_tenant_tokens_per_minute": 40, "num_tokens": 10}, "key_tokens"),
    ],
)
async def test_three_gateways_together_admit_as_much_as_one(gateways, options, reason):
    assert await admit_all(gateways, 3, **options) == [reason] * 5


async def test_an_abandoned_call_releases_its_reservation(ends, monkeypatch):
    monkeypatch.setattr(shared.queue.worker, "GONE_AFTER_S", 0.0)
    await ends.enqueue(make_request(reply_to="gone"), num_tokens=7)
    worker = ends.worker("a")
    claim = await ends.claim(worker)
    assert (await refusal(ends.queue, max_tokens=7)).reason == "open_tokens"
    assert await worker.publish([publication(claim, 1, 0, make_delta(claim, 0, 5))]) == {}
    assert await ends.redis.exists(ends.keys.mailbox(MODEL, "gone")) == 0

    assert await worker.cancel_deserted([claim]) == [claim]

    again = await ends.enqueue(num_tokens=7, max_tokens=7)
    assert await ends.reserved() == {f"7  {again.id}"}


async def test_the_reservation_of_an_abandoned_request_expires_with_it(ends):
    """Its gateway was killed and no worker claimed it: the request expires together with its reservation."""
    request = await ends.enqueue(num_tokens=7)
    assert (await refusal(ends.queue, max_tokens=7)).reason == "open_tokens"

    reservations = ends.keys.reservations(MODEL)
    [reservation] = await ends.redis.zrange(reservations, 0, -1)
    remembered_ms = await ends.redis.pttl(ends.keys.request(MODEL, request.id))
    forgotten_at_ms = await ends.redis.zscore(reservations, reservation)
    seconds, microseconds = await ends.redis.time()
    now_ms = seconds * 1000 + microseconds / 1000
    assert forgotten_at_ms - now_ms == pytest.approx(remembered_ms, abs=1000)
    await ends.redis.zadd(reservations, {reservation: now_ms - 1})

    await ends.enqueue(num_tokens=7, max_tokens=7)
    assert (await ends.redis.hgetall(ends.keys.usage(MODEL)))[b"tokens"] == b"7"


@in_one_round
async def test_the_limit_per_minute_refills_continuously(ends):
    options = {"tenant": "a", "max_tenant_requests_per_minute": 1200}  # one per 50 ms
    rates = ends.keys.rates(MODEL, "a")
    seconds, microseconds = await ends.redis.time()
    now_ms = seconds * 1000 + microseconds / 1000
    await ends.redis.hset(rates, "requests", now_ms + 60_200)

    for _ in range(2):  # a refusal is not charged
        refused = await refusal(ends.queue, **options)
        assert 0 < refused.wait_s <= 0.26
    await enqueue(ends.queue, make_request(tenant="b"), max_tenant_requests_per_minute=1)
    await asyncio.sleep(refused.wait_s + 0.001)
    await enqueue(ends.queue, make_request(tenant="a"), max_tenant_requests_per_minute=1200)
    assert 0 < await ends.redis.pttl(rates) <= 60_300


@pytest.mark.parametrize(("num_tokens", "wait_s"), [(0, None), (90, 31), (150, 91)])
async def test_unused_tokens_are_refunded_once_at_the_end(ends, num_tokens, wait_s):
    """The request reserved 90 tokens with a limit of 60 per minute."""
    options = {"max_tenant_tokens_per_minute": 60}
    request = await ends.enqueue(num_tokens=90, **options)
    worker = ends.worker("a")
    claim = await ends.claim(worker)
    refund = partial(ends.queue.refund, reserve(request, num_tokens=90, **options))
    assert not await refund()
    deltas = [make_delta(claim, 0, *range(num_tokens))] if num_tokens else []
    end = make_finished(claim, num_tokens)
    await worker.publish([publication(claim, 1, 0, *deltas, end)])
    for _ in range(2):
        assert await refund()
    if wait_s is None:
        await ends.enqueue(num_tokens=1, **options)
        return
    refused = await refusal(ends.queue, num_tokens=1, **options)
    assert refused.wait_s == pytest.approx(wait_s, abs=1)
    assert 0 < await ends.redis.pttl(ends.keys.rates(MODEL, "")) <= 1000 * (wait_s + 60)


async def test_a_lost_budget_is_recreated_only_with_its_spent_amount(ends):
    """A budget created by the end of a call or an expired reservation would have no TTL and lack earlier spending."""
    budget = Budget("2026-11", most=9, reserved=1, ttl_s=60.0)
    key, redis = ends.keys.budget("", budget.period), ends.redis
    calls = [
        Submission([seal(make_request())], 60.0, 9, charge=Charge(budget=budget)) for _ in "abc"
    ]
    await ends.queue.set_spent("", "", budget, 5)
    for call in calls[:2]:
        await ends.queue.submit(call)
    claims = [await ends.claim(worker := ends.worker("a")) for _ in calls[:2]]
    await redis.delete(key)
    await worker.publish([publication(claims[0], 1, 0, make_finished(claims[0], 0))])
    await redis.zadd(f"{key}:open", {"1 expired": 1})
    with pytest.raises(UnknownBudget):
        await ends.queue.submit(calls[2])
    assert not await redis.exists(key)
    await ends.queue.set_spent("", "", budget, 5)
    await ends.queue.submit(calls[2])
    await worker.publish([publication(claims[1], 1, 0, make_finished(claims[1], 0))])
    assert await redis.hgetall(key) == {b"spent": b"5", b"reserved": b"1"}


async def test_logprobs_count_by_their_memory(gateways):
    """A token with twenty logprobs needs as much memory in Redis as five tokens without."""
    sampling = SamplingParams(max_tokens=100, num_logprobs=19)
    room = {"num_tokens": 100, "max_tokens": 1000}
    await enqueue(gateways[0], make_request(sampling=sampling), **room)
    await enqueue(gateways[0], make_request(sampling=sampling), **room)
    with pytest.raises(QueueRefused, match="open_tokens"):
        await enqueue(gateways[0], make_request(), **room)
