"""Fallbacks: another model answers while a model is full or has no worker, and the answer names it."""

import asyncio
from contextlib import asynccontextmanager
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace

from shared.protocol import ErrorCode
from shared.queue.registry import WorkerRecord
from tests.factories_gateway import CARD, MODEL, make_body
from tests.factories_keys import bearer
from tests.waiting import until, until_equal

OTHER = "other"
FROM = "x-vlm-fallback-from"
FALLBACKS = {MODEL: OTHER, OTHER: "third", "absent": OTHER, "gone": "absent"}


@pytest.fixture
def card():
    return replace(CARD, tasks=("generate", "tokenize"))


@pytest.fixture
def changes():
    return {
        "gateway": {"fallbacks": FALLBACKS, "aliases": {"alias": "absent"}},
        "limits": {"max_queue_depth": 1},
    }


@pytest.fixture
async def other(fleet, worker):
    card = replace(CARD, name=OTHER, vocab_size=500)
    async with fleet.worker(card) as other:
        for each in (worker, other):
            await other.registry.announce(WorkerRecord(each.card.name, each.card, "m"), ttl_s=600)
        yield other


async def num_open(gateway, model):
    return (await gateway.services.queue.stats(model)).num_open


@asynccontextmanager
async def filled(gateway, worker, headers=None):
    """Fills the queue of the worker's model; the worker claims nothing."""
    model = worker.card.name
    worker.stop_claiming()
    await until(lambda: worker.has_ended)
    waiting = asyncio.create_task(gateway.chat(make_body(model=model), headers=headers))
    try:
        await until_equal(lambda: num_open(gateway, model), 1)
        yield
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])


@pytest.fixture
async def full(other, worker, gateway):
    await gateway.services.models.refresh()
    async with filled(gateway, worker):
        yield gateway


async def counted(gateway) -> list[str]:
    text = (await gateway.client.get("/metrics")).text
    return [line for line in text.splitlines() if line.startswith("vlm_fallbacks_total{")]


async def test_the_fallback_of_a_full_model_answers_and_is_named(full, other):
    answer = await full.chat()
    assert answer.status_code == 200, answer.text
    assert (answer.json()["model"], answer.headers[FROM]) == (OTHER, MODEL)
    stream = await full.chat(make_body(stream=True))
    assert stream.headers[FROM] == MODEL
    assert f'"model":"{OTHER}"' in stream.text
    assert [request.model for request in other.requests] == [OTHER, OTHER]
    assert await counted(full) == [f'vlm_fallbacks_total{{fallback="{OTHER}",model="{MODEL}"}} 2.0']
    metrics = (await full.client.get("/metrics")).text
    assert f'vlm_requests_total{{model="{OTHER}",outcome="ok"}} 2.0' in metrics
    headers = {"idempotency-key": "one"}  # a resumable request and its retry
    first, again = [await full.chat(headers=headers) for _ in range(2)]
    assert first.json() == again.json()
    assert (again.json()["model"], again.headers[FROM]) == (OTHER, MODEL)
    assert len(other.requests) == 3


async def test_a_retry_follows_the_request_of_the_fallback(gateway, other, worker):
    """The retry follows that request even if the model has room again, so the request runs once."""
    worker.script = lambda answer: answer.fail(ErrorCode.IMAGE_UNAVAILABLE)
    await gateway.services.models.refresh()
    key, body = {"idempotency-key": "two"}, make_body(stream=True)
    assert (await gateway.chat(body, headers=key)).status_code == 503
    async with filled(gateway, worker):
        moved = await gateway.chat(body, headers=key)
    again = await gateway.chat(body, headers=key, timeout=5)
    resumed = await gateway.client.get(moved.headers["x-vlm-stream"], timeout=5)
    assert all(f'"model":"{OTHER}"' in each.text for each in (moved, again, resumed))
    assert len(other.requests) == 1


async def test_a_request_retried_at_two_gateways_is_queued_once(
    fleet, changes, gateway, other, worker, monkeypatch
):
    """The first gateway is about to queue the request when the second one falls back."""
    go_on, submit = asyncio.Event(), gateway.services.queue.submit

    async def submit_late(submission):
        await go_on.wait()
        return await submit(submission)

    late = AsyncMock(side_effect=submit_late)
    monkeypatch.setattr(gateway.services.queue, "submit", late)
    async with fleet.gateway(**changes) as second:
        hold = AsyncMock(wraps=second.services.leases.hold)
        monkeypatch.setattr(second.services.leases, "hold", hold)
        key = {"idempotency-key": "three"}
        first = asyncio.create_task(gateway.chat(headers=key))
        await until(lambda: late.called)
        async with filled(second, worker):
            retry = asyncio.create_task(second.chat(headers=key))
            await until(lambda: hold.await_count or retry.done())
        await until_equal(lambda: num_open(gateway, MODEL), 0)
        go_on.set()
        await until_equal(lambda: num_open(gateway, MODEL), 1)
        await until(lambda: second.services.dispatcher.has_open(MODEL))
        first.cancel()
        retry.cancel()
    assert not other.requests


async def test_requests_that_cannot_fall_back_get_the_error_of_their_model(full, other):
    tokenized = await full.client.post("/tokenize", json={"model": MODEL, "prompt": "hi"})
    refused = await full.chat(make_body(logit_bias={"900": 1}))  # not in the vocabulary
    async with filled(full, other):  # a fallback has no fallback
        full_too = await full.chat()
    for answer in (tokenized, refused, full_too):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_overloaded")
        assert FROM not in answer.headers
    assert not await counted(full)
    metrics = (await full.client.get("/metrics")).text
    assert f'vlm_requests_total{{model="{MODEL}",outcome="rejected"}} 3.0' in metrics


async def test_the_fallback_answers_for_a_model_without_a_worker(gateway, other, worker):
    await gateway.services.models.refresh()
    for model in ("absent", "alias"):
        answer = await gateway.chat(make_body(model=model))
        assert (answer.json()["model"], answer.headers[FROM]) == (OTHER, model)
    assert await counted(gateway) == ['vlm_fallbacks_total{fallback="other",model="absent"} 2.0']
    assert FROM not in (await gateway.chat()).headers
    for name in ("scripted", MODEL):
        await worker.registry.withdraw(name)
    await gateway.services.models.refresh()
    answer = await gateway.chat()
    assert (answer.json()["model"], answer.headers[FROM]) == (OTHER, MODEL)
    answer = await gateway.chat(make_body(model="gone"))
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_a_key_needs_permission_for_the_fallback_too(fleet, changes, other, worker):
    changes["gateway"] |= {"root_key": "root"}
    async with fleet.gateway(**changes) as gateway:
        keys = []
        for number, models in enumerate(([MODEL], [OTHER], [MODEL, OTHER])):
            body = {"name": f"key{number}", "models": models}
            made = await gateway.client.post("/v1/admin/keys", json=body, headers=bearer("root"))
            keys.append(bearer(made.json()["key"]))
        async with filled(gateway, worker, keys[2]):
            answers = [await gateway.chat(headers=key) for key in keys]
    assert [answer.status_code for answer in answers] == [503, 403, 200]
