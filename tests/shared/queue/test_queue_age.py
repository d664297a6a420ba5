"""How long the oldest request waits: what autoscaling looks at."""

import time

import pytest

from shared.queue.api import QueueUnavailable
from shared.queue.gateway import RedisGatewayQueue
from shared.queue.keys import GROUP
from shared.redis.client import create_redis
from shared.settings.tree import RedisSettings
from tests.factories_queue import MODEL


async def add(ends, age_s: float) -> None:
    """An entry that has waited so long; Redis names entries by their time."""
    entry = f"{round((time.time() - age_s) * 1000)}-0"
    await ends.redis.xadd(ends.keys.queue(MODEL), {"id": "request"}, id=entry)


async def read(ends, count: int) -> None:
    queue = {ends.keys.queue(MODEL): ">"}
    await ends.redis.xreadgroup(GROUP, "worker", queue, count=count)


async def test_where_nothing_waits_it_is_nothing(ends):
    assert (await ends.queue.stats(MODEL)).age_s == 0.0
    await ends.worker("a").create_group()
    assert (await ends.queue.stats(MODEL)).age_s == 0.0


@pytest.mark.parametrize("has_workers", [False, True])
async def test_it_is_the_age_of_the_oldest(ends, has_workers):
    if has_workers:
        await ends.worker("a").create_group()
    await add(ends, 60.0)
    await add(ends, 20.0)
    assert (await ends.queue.stats(MODEL)).age_s == pytest.approx(60.0, abs=5)


async def test_what_a_worker_has_taken_does_not_wait(ends):
    await ends.worker("a").create_group()
    for age_s in (90.0, 60.0, 30.0):
        await add(ends, age_s)
    await read(ends, 2)
    assert (await ends.queue.stats(MODEL)).age_s == pytest.approx(30.0, abs=5)
    await read(ends, 1)
    assert (await ends.queue.stats(MODEL)).age_s == 0.0


async def test_without_redis_nobody_knows(redis_prefix):
    client = create_redis(RedisSettings(url="unix:///nonexistent/redis.sock"))
    queue = RedisGatewayQueue(client, redis_prefix)
    with pytest.raises(QueueUnavailable):
        await queue.stats(MODEL)
    await queue.close()
    await client.aclose()
