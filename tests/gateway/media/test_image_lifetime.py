"""The lifetime of images in Redis: until their request ends, and a little longer."""

import asyncio

import pytest
from redis.asyncio import Redis

from shared.queue.keys import BLOB_LINGER_S, RedisKeys
from tests.factories_gateway import Answer, make_body, say_nothing
from tests.factories_images import data_url, image_part
from tests.waiting import until


def image_body(**changes):
    return make_body([image_part(data_url(1))], **changes)


async def image_ttls(redis: Redis, prefix: str) -> list[int]:
    keys = [key async for key in redis.scan_iter(RedisKeys(prefix).blob("?" * 64))]
    return [await redis.ttl(key) for key in keys]


async def until_released(redis: Redis, prefix: str) -> None:
    async def are_released() -> bool:
        ttls = await image_ttls(redis, prefix)
        return bool(ttls) and max(ttls) <= BLOB_LINGER_S

    await until(are_released)


async def test_an_image_expires_soon_after_its_request_or_its_client(
    gateway, worker, redis, redis_prefix
):
    seen: list[int] = []

    async def script(answer: Answer) -> None:
        seen.extend(await image_ttls(redis, redis_prefix))
        await answer.finish("red")

    worker.script = script
    response = await gateway.chat(image_body(n=2))

    assert response.status_code == 200
    assert min(seen) > gateway.services.settings.gateway.request_timeout_s
    await until_released(redis, redis_prefix)
    worker.script = say_nothing
    num_before = len(worker.requests)
    leaving = asyncio.create_task(gateway.chat(image_body()))
    await until(lambda: len(worker.requests) > num_before)
    leaving.cancel()
    await asyncio.wait([leaving])
    await until_released(redis, redis_prefix)


@pytest.mark.parametrize("changes", [{"limits": {"max_key_requests_per_minute": 1}}])
async def test_an_image_of_a_request_that_was_not_queued_expires_soon(
    gateway, worker, redis, redis_prefix, changes
):
    assert (await gateway.chat()).status_code == 200
    response = await gateway.chat(image_body())
    assert response.status_code == 429
    await until_released(redis, redis_prefix)
