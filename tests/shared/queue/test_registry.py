"""The registry of workers and gateways: those that stop announcing themselves are removed."""

from types import SimpleNamespace

import pytest

import shared.queue.worker
from shared.protocol import ModelCard
from shared.queue.keys import RedisKeys
from shared.queue.registry import Registry, WorkerRecord
from shared.queue.worker import GONE_AFTER_S, Publisher
from shared.redis.client import RedisSender


@pytest.fixture
async def registry(redis, redis_prefix):
    registry = Registry(redis, redis_prefix)
    yield registry
    await registry.close()


def make_record(worker_id: str = "w1", model: str = "m") -> WorkerRecord:
    return WorkerRecord(worker_id, ModelCard(model, 1, 128, 100), "mock")


async def test_workers_are_listed_until_their_record_expires(registry, redis, redis_prefix):
    await registry.announce(make_record("w1"), ttl_s=60)
    await registry.announce(make_record("w2", "n"), ttl_s=60)
    assert {record.worker_id for record in await registry.workers()} == {"w1", "w2"}

    await redis.delete(RedisKeys(redis_prefix).worker("w2"))  # as if expired
    assert [record.worker_id for record in await registry.workers()] == ["w1"]
    await registry.withdraw("w1")

    assert await registry.workers() == []
    assert [card.name for card in await registry.models()] == ["m", "n"]


@pytest.mark.parametrize("junk", [b'{"worker_id":7}', b"\xff"])
async def test_an_unreadable_record_hides_no_other_record(
    registry, redis, redis_prefix, caplog, junk
):
    keys = RedisKeys(redis_prefix)
    await registry.announce(make_record("w1", "m"), ttl_s=60)
    await redis.sadd(keys.workers, "odd")
    await redis.set(keys.worker("odd"), junk, px=60_000)
    await redis.sadd(keys.models, "odd")
    await redis.set(keys.model("odd"), junk, px=60_000)

    for _ in range(3):
        assert [record.worker_id for record in await registry.workers()] == ["w1"]
        assert [card.name for card in await registry.models()] == ["m"]

    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2  # one message per record, not per lookup
    assert all("odd" in message for message in told)


async def test_a_gateway_without_a_mailbox_is_removed(redis, redis_prefix, monkeypatch):
    sender, keys = RedisSender(redis), RedisKeys(redis_prefix)
    publisher = Publisher(sender, keys, "m", "w1")
    for missing, at, gone in (
        ("a", 0.0, set()),
        ("a", GONE_AFTER_S - 0.1, set()),
        ("ab", GONE_AFTER_S, {"a"}),
        ("a", GONE_AFTER_S + 1, {"a"}),  # "b" has created its mailbox again
        ("b", 2 * GONE_AFTER_S, set()),
    ):
        for name in "ab":
            await redis.set(keys.mailbox("m", name), 1, px=60_000)
        await redis.delete(*(keys.mailbox("m", name) for name in missing))
        clock = SimpleNamespace(monotonic=lambda at=at: at)
        monkeypatch.setattr(shared.queue.worker, "time", clock)
        assert await publisher.find_gone("ab") == gone
    await sender.close()


async def test_unknown_fields_in_records_of_newer_workers_are_ignored(
    registry, redis, redis_prefix
):
    keys = RedisKeys(redis_prefix)
    await registry.announce(make_record("w1", "m"), ttl_s=60)
    record, card = await redis.get(keys.worker("w1")), await redis.get(keys.model("m"))
    newer_record = record.replace(b'"card":{', b'"mood":"fine","card":{"colour":"red",')
    await redis.set(keys.worker("w1"), newer_record, px=60_000)
    await redis.set(keys.model("m"), card[:-1] + b',"colour":"red"}', px=60_000)

    assert await registry.workers() == [make_record("w1", "m")]
    assert await registry.models() == [make_record("w1", "m").card]
