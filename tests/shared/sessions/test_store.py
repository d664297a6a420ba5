"""Sessions in Redis: how many an owner has, and that nothing of them outlives its time."""

import asyncio

import pytest

from shared.sessions.store import Session, SessionStore


@pytest.fixture
async def store(redis, redis_prefix):
    store = SessionStore(redis, redis_prefix)
    yield store
    await store.close()


def make_session(name: str, idle_s: float = 60.0) -> Session:
    return Session(name, "owner", "app", 1.0, idle_s=idle_s, timeout_s=0.0)


async def test_sessions_that_have_expired_make_room_for_others(store):
    await store.create(make_session("sess_1", idle_s=0.01))
    await store.create(make_session("sess_2"))
    assert await store.find_room("owner", 3)
    assert await store.find_room("other", 2)
    async with asyncio.timeout(20):
        while await store.find("sess_1") is not None:
            await asyncio.sleep(0.01)
    assert await store.find_room("owner", 2)
    await store.create(make_session("sess_3"))
    assert not await store.find_room("owner", 2)


async def test_every_key_expires_also_of_a_session_that_is_closed_too_late(
    store, redis, redis_prefix
):
    await store.create(make_session("sess_1"))
    await store.close_session("sess_1")
    await store.close_session("sess_gone")
    keys = [key async for key in redis.scan_iter(f"{redis_prefix}:*")]
    assert len(keys) == 2
    assert all([await redis.ttl(key) > 0 for key in keys])
    found = await store.find("sess_1")
    assert found is not None
    assert found.state == "closed"
    assert await store.find("sess_gone") is None
