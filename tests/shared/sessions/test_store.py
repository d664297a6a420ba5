"""Sessions in Redis: limits under concurrent calls, and times to live of all keys."""

import asyncio

import pytest

from shared.queue.keys import RedisKeys
from shared.sessions.store import Session, SessionStore, TaskRecord


@pytest.fixture
async def store(redis, redis_prefix):
    store = SessionStore(redis, redis_prefix)
    yield store
    await store.close()


def make_session(name: str, created_at: float = 1.0) -> Session:
    return Session(name, "owner", "app", created_at, idle_s=60.0, timeout_s=0.0)


async def test_concurrent_reservations_do_not_exceed_the_limit(store):
    await store.create(make_session("sess_0"))
    many = [make_session(f"sess_{number}") for number in range(1, 9)]
    passed = await asyncio.gather(
        *(store.reserve(session, 3) for session in many), store.page("owner", "", 10, 0)
    )
    assert passed[:-1].count(True) <= 2
    assert not await store.reserve(make_session("sess_9"), passed[:-1].count(True) + 1)


async def test_a_page_reads_only_its_own_sessions(store, redis, redis_prefix):
    """Sessions that are still being created do not count towards the page size."""
    session, keys = make_session("sess_1", 5.0), RedisKeys(redis_prefix)
    for each in (make_session("sess_0", 4.0), session):
        await store.create(each)
    for number in range(3):
        await store.reserve(make_session(f"sess_{number + 2}", 6.0), 9)
        task = TaskRecord(f"task_{number}", "req", "m", "p", "f", float(number % 2), 9.0, "x" * 9)
        await store.add(session, task, 9)
    later = {f"{number:0500}": 9 for number in range(1000)}
    await redis.zadd(keys.session_order("sess_1"), later)
    await redis.zadd(keys.sessions("owner"), dict.fromkeys(later, 1))
    before = (await redis.info("stats"))["total_net_output_bytes"]
    shown = [await store.page("owner", after, 1, 0) for after in ("", "sess_1")]
    pages = [await store.task_page("sess_1", after, 2) for after in ("", "task_2", "task_9")]
    assert (await redis.info("stats"))["total_net_output_bytes"] - before < 100_000
    assert [each.session.id for states, _ in shown for each in states] == ["sess_1", "sess_0"]
    ids = [page and [task.id for task, _ in page[0]] for page in pages]
    assert ids == [["task_0", "task_2"], ["task_1"], None]


async def test_every_key_expires_even_if_a_session_is_closed_late(store, redis, redis_prefix):
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


async def test_the_end_of_a_task_does_not_restore_a_deleted_session(store, redis, redis_prefix):
    session = make_session("sess_1")
    await store.create(session)
    await store.add(session, TaskRecord("task_1", "req_1", "m", "p", "f", 1.0, 2.0), 9)
    key = RedisKeys(redis_prefix).session("sess_1")
    await redis.delete(key)
    await store.settle("sess_1", {"task_1": "succeed"})
    assert not await redis.exists(key)
