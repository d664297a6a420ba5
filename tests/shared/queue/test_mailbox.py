"""A gateway's mailbox: events arrive across outages, and gaps are reported."""

import asyncio
from pathlib import Path

import pytest

import shared.queue.gateway
from shared.protocol import ErrorCode, Failed, decode_events, encode
from shared.queue.gateway import RedisMailbox
from shared.queue.keys import RedisKeys
from shared.redis.client import create_redis
from shared.settings.tree import RedisSettings
from tests.faults.proxy import run_proxy
from tests.waiting import until


@pytest.fixture
async def open_mailbox(redis_blocking, redis_prefix):
    opened = []

    def create(**options) -> RedisMailbox:
        opened.append(RedisMailbox(redis_blocking, redis_prefix, "g", **options))
        return opened[-1]

    yield create
    for mailbox in opened:
        await mailbox.close()


@pytest.fixture
def post(redis, redis_prefix):
    """Posts an event that contains the request's name, as a worker does."""

    async def post(name: str, model: str = "m") -> None:
        event = Failed(name, 1, ErrorCode.CANCELLED, "")
        key = RedisKeys(redis_prefix).mailbox(model, "g")
        await redis.xadd(key, {"events": b"[" + encode(event) + b"]"}, nomkstream=True)

    return post


async def names(events, count: int) -> list[str]:
    async with asyncio.timeout(10):
        return [decode_events((await anext(events))[1])[0].request_id for _ in range(count)]


async def test_a_model_opened_later_is_read_immediately(open_mailbox, post):
    mailbox = open_mailbox()
    await mailbox.open(["m"])
    waiting = asyncio.create_task(names(mailbox.events(), 1))
    await asyncio.sleep(0.02)  # the reader usually blocks by now; the test passes either way

    await mailbox.open(["m", "n"])
    await post("late", model="n")

    assert await asyncio.wait_for(waiting, 1.8) == ["late"]


async def test_an_outage_is_a_gap_of_all_models_and_lost_mailboxes_are_recreated(
    redis, redis_server, redis_prefix, post
):
    gaps: list[str] = []
    async with run_proxy(Path(redis_server.removeprefix("unix://"))) as proxy:
        blocking = create_redis(RedisSettings(url=proxy.url), blocking=True)
        mailbox = RedisMailbox(blocking, redis_prefix, "g", gaps.append)
        await mailbox.open(["m", "n"])
        events = mailbox.events()
        reading = asyncio.create_task(names(events, 1))
        await post("1")
        await redis.delete(RedisKeys(redis_prefix).mailbox("n", "g"))
        await reading
        reading = asyncio.create_task(names(events, 2))
        proxy.reset()
        await post("2")
        await until(lambda: sorted(gaps) == ["m", "n"])
        await post("3", model="n")
        assert sorted(await reading) == ["2", "3"]
        await mailbox.close()
        await blocking.aclose()


async def test_entries_trimmed_before_they_were_read_are_a_gap(
    open_mailbox, post, redis, redis_prefix, monkeypatch
):
    monkeypatch.setattr(shared.queue.gateway, "MAX_ENTRIES_PER_READ", 4)
    gaps: list[str] = []
    mailbox = open_mailbox(on_gap=gaps.append)
    await mailbox.open(["m"])
    events = mailbox.events()
    for number in range(4):
        await post(str(number))
    assert await names(events, 4) == ["0", "1", "2", "3"]
    assert gaps == []

    for number in range(4, 12):
        await post(str(number))
    await redis.xtrim(RedisKeys(redis_prefix).mailbox("m", "g"), maxlen=5, approximate=False)

    assert await names(events, 5) == ["7", "8", "9", "10", "11"]
    assert gaps == ["m"]
