"""Sessions in Redis: how many an owner has, and that nothing of them outlives its time."""

import asyncio

import pytest

from shared.sessions.store import Session, SessionStore
from tests.waiting import until_equal


@pytest.fixture
async def store(redis, redis_prefix):
    store = SessionStore(redis, redis_prefix)
    yield store
    await store.close()


def make_session(name: str, idle_s: float = 60.0) -> Session:
    return Session(name, "owner", "app", 1.0, idle_s=idle_s, timeout_s=0.0)


async def test_sessions_that_have_expired_make_room_for_others(store):
    async def opens(name: str, max_sessions: int, idle_s: float = 60.0) -> bool:
        session = make_session(name, idle_s)
        if has_place := await store.take_place(session, max_sessions):
            await store.create(session)
        return has_place

    assert await opens("sess_1", 3, idle_s=0.01)
    assert await opens("sess_2", 3)
    await until_equal(lambda: store.find("sess_1"), None)
    assert await opens("sess_3", 2)
    assert not await opens("sess_4", 2)
    assert await opens("sess_5", 3)
    page = await store.page("owner", "", 10, 0)
    assert page is not None
    assert [state.session.id for state in page[0]] == ["sess_5", "sess_3", "sess_2"]


async def test_of_many_at_once_no_more_pass_than_there_are_places(store):
    await store.create(make_session("sess_0"))
    many = [make_session(f"sess_{number}") for number in range(1, 9)]
    passed = await asyncio.gather(
        *(store.take_place(session, 3) for session in many), store.page("owner", "", 10, 0)
    )
    assert passed[:-1].count(True) <= 2
    assert not await store.take_place(make_session("sess_9"), passed[:-1].count(True) + 1)


async def test_every_key_expires_also_of_a_session_that_is_closed_too_late(
    store, redis, redis_prefix
):
    await store.create(make_session("sess_1"))
    await store.close_session(make_session("sess_1"))
    await store.close_session(make_session("sess_gone"))
    keys = [key async for key in redis.scan_iter(f"{redis_prefix}:*")]
    assert len(keys) == 2
    assert all([await redis.ttl(key) > 0 for key in keys])
    found = await store.find("sess_1")
    assert found is not None
    assert found.state == "closed"
    assert await store.find("sess_gone") is None
