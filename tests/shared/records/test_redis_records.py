"""Records in Redis: limits by number and bytes, and times to live of records and their images."""

import asyncio

import pytest

from shared.protocol import ImageRef
from shared.records.store import Record, RecordStore
from shared.redis.client import RedisSender
from tests.waiting import until_equal

IMAGE = ImageRef("a" * 64, 50, "image/png", 1, 1)


@pytest.fixture
async def make(redis, redis_prefix):
    stores = []

    def make(**changes) -> RecordStore:
        limits = {"ttl_s": 60, "max_records": 3, "max_bytes": 100, **changes}
        stores.append(RecordStore(redis, redis_prefix, **limits))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


async def test_a_record_is_immutable_and_visible_to_its_owner_only(make):
    store, record = make(), Record(b"x" * 10, (IMAGE,))
    assert await store.put("me", "one", record) == []
    assert await store.put("me", "one", Record(b"other")) == []
    assert await store.get("me", "one") == record
    assert await store.get("you", "one") is None
    assert await store.delete("you", "one") is None
    assert await store.delete("me", "one") == record
    assert await store.get("me", "one") is None


async def test_a_replaced_record_has_a_new_value_and_time(make):
    store = make(max_records=2)
    for name in ("a", "b", "a"):
        assert await store.put("me", name, Record(b"x" * 40), anew=True) == []
        await asyncio.sleep(0.002)
    assert await store.put("me", "c", Record(b"x" * 60)) == [("b", Record(b"x" * 40))]
    assert await store.put("me", "a", Record(b"y" * 40), anew=True) == []
    assert await store.get("me", "a") == Record(b"y" * 40)


async def test_the_oldest_records_are_evicted_by_number_and_bytes(make):
    store = make()
    for name in "abc":
        assert await store.put("me", name, Record(b"x" * 10)) == []
        await asyncio.sleep(0.002)  # records of one millisecond are ordered by name
    assert await store.put("me", "d", Record(b"x" * 10)) == [("a", Record(b"x" * 10))]
    made_room = await store.put("me", "e", Record(b"x" * 30, (IMAGE,)))
    assert [name for name, _ in made_room] == ["b"]
    assert await store.put("me", "too large", Record(b"x" * 101)) is None
    assert await store.get("me", "too large") is None
    assert await store.put("you", "a", Record(b"x" * 90)) == []


async def test_every_key_expires_and_expired_records_are_not_counted(make, redis, redis_prefix):
    store = make(ttl_s=3600, max_bytes=10)
    await store.put("me", "one", Record(b"x" * 10))
    keys = [key async for key in redis.scan_iter(f"{redis_prefix}:*")]
    assert len(keys) == 3
    assert all([0 < await redis.ttl(key) <= 3600 for key in keys])
    short = make(ttl_s=0.05, max_bytes=10)
    await short.put("you", "one", Record(b"x" * 10))
    await until_equal(lambda: short.get("you", "one"), None)
    assert await store.put("you", "two", Record(b"x" * 10)) == []


async def test_a_call_repeated_after_a_lost_reply_returns_the_same_result(make, monkeypatch):
    run = RedisSender.run

    async def run_twice(*arguments):
        await run(*arguments)  # the reply of this call is lost
        return await run(*arguments)

    monkeypatch.setattr(RedisSender, "run", run_twice)
    store = make(max_records=1)
    first, second = Record(b"x" * 10, (IMAGE,)), Record(b"\xff" * 10)
    assert await store.put("me", "one", first) == []
    assert await store.put("me", "two", second) == [("one", first)]
    assert await store.delete("me", "two") == second
    assert await store.delete("me", "two") is None
    assert await store.put("me", "two", first) == []
