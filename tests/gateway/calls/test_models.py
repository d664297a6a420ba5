"""Which models the gateway lists and takes requests for, once their workers are gone."""

import asyncio

from msgspec.structs import replace

from shared.queue.keys import MODEL_TTL_S, RedisKeys, to_ms
from shared.queue.registry import WorkerRecord
from tests.factories_gateway import CARD, make_body
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
    async with asyncio.timeout(10):
        answer = await gateway.chat(make_body(model="old"))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_worker"
    assert answer.headers["retry-after"]
    await worker.registry.announce(record, ttl_s=600)
    await until_equal(listed, {CARD.name, "old"})
