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
    """The queue of the worker's model is full, and does not move."""
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
    headers = {"idempotency-key": "one"}  # a resumable stream, and a retry that follows it
    first, again = [await full.chat(headers=headers) for _ in range(2)]
    assert first.json() == again.json()
    assert (again.json()["model"], again.headers[FROM]) == (OTHER, MODEL)
    assert len(other.requests) == 3


async def test_a_retry_that_fell_back_is_followed_there(gateway, other, worker):
    """Also once the model has room again: the request runs once."""
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


async def test_a_request_that_two_gateways_retry_at_once_is_queued_once(
    fleet, changes, gateway, other, worker, monkeypatch
):
    """The first is about to queue it when the second would fall back."""
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


async def test_what_the_fallback_refuses_and_what_is_no_text_gets_the_models_own_error(full, other):
    tokenized = await full.client.post("/tokenize", json={"model": MODEL, "prompt": "hi"})
    refused = await full.chat(make_body(logit_bias={"900": 1}))  # beyond its vocabulary
    async with filled(full, other):  # only one step is taken
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


async def test_a_key_needs_both_models(fleet, changes, other, worker):
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
