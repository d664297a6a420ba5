"""The models that the gateway lists and serves, by their workers, protocol versions and deployments."""

import asyncio

import pytest
from msgspec.structs import replace

from gateway.calls.models import Route
from shared.queue.keys import MODEL_TTL_S, RedisKeys, to_ms
from shared.queue.registry import WorkerRecord
from tests.factories_gateway import CARD, MODEL, make_body
from tests.factories_keys import code
from tests.waiting import until_equal


async def test_a_model_without_workers_leaves_the_list_after_two_minutes(
    gateway, worker, redis, redis_prefix
):
    old = replace(CARD, name="old")
    record = WorkerRecord("w", old, "mock")

    async def listed() -> set[str]:
        models = (await gateway.client.get("/v1/models")).json()["data"]
        return {model["id"] for model in models}

    await worker.registry.announce(record, ttl_s=600)
    await until_equal(listed, {CARD.name, "old"})
    await worker.registry.withdraw("w")
    key = RedisKeys(redis_prefix).model("old")
    for silent_s, names in ((100, {CARD.name, "old"}), (121, {CARD.name})):
        await redis.pexpire(key, to_ms(MODEL_TTL_S - silent_s))
        await until_equal(listed, names)
        metrics = (await gateway.client.get("/metrics")).text
        assert ('vlm_queue_depth{model="old"}' in metrics) == ("old" in names)
    async with asyncio.timeout(10):
        answer = await gateway.chat(make_body(model="old"))
    assert code(answer)[:2] == (503, "no_worker")
    assert answer.headers["retry-after"]
    await worker.registry.announce(record, ttl_s=600)
    await until_equal(listed, {CARD.name, "old"})


@pytest.mark.parametrize("card", [replace(CARD, version=1)])
async def test_a_model_whose_workers_speak_version_1_is_refused_by_name(gateway, worker):
    response = await gateway.chat()
    models = (await gateway.client.get("/v1/models")).json()["data"]
    assert response.status_code == 503
    assert response.headers["retry-after"]
    error = response.json()["error"]
    assert error["code"] == "unsupported_version"
    assert "the gateway speaks protocol 2, the worker 1: update the worker" in error["message"]
    assert worker.requests == []
    assert MODEL not in [model["id"] for model in models]


async def test_a_deployment_represents_its_versions_among_the_served_models(gateway):
    """Otherwise a vector store without `embedding_model` would be bound to a version that retires."""
    models = gateway.services.models
    version = replace(CARD, name="emb@3f2a3f2a3f2a", package="emb@sha256:0")
    plain = replace(CARD, name="plain")
    models.cards = {card.name: card for card in (version, plain)}
    models.routes = {"emb": Route(replace(version, name="emb", parent=version.name))}
    assert [card.name for card in models.served()] == ["emb", "plain"]
