"""Images and workers: what is put is found, what is not renewed goes away."""

from hashlib import sha256

import pytest

from shared.blobs.store import ImageStore
from shared.protocol import ModelCard
from shared.queue.keys import IMAGE_LINGER_S, RedisKeys
from shared.queue.registry import Registry, WorkerRecord

IMAGE = b"an image"
DIGEST = sha256(IMAGE).hexdigest()


@pytest.fixture
async def store(redis, redis_prefix):
    store = ImageStore(redis, redis_prefix)
    yield store
    await store.close()


@pytest.fixture
async def registry(redis, redis_prefix):
    registry = Registry(redis, redis_prefix)
    yield registry
    await registry.close()


def make_record(worker_id: str = "w1", model: str = "m") -> WorkerRecord:
    return WorkerRecord(worker_id, ModelCard(model, 1, 128, 100), "mock")


async def test_an_image_is_found_by_its_hash(store):
    await store.put_all([(DIGEST, IMAGE)], ttl_s=60)

    assert await store.get(DIGEST) == IMAGE
    assert await store.get("0" * 64) is None


async def test_bytes_that_are_not_those_of_the_hash_are_not_given_out(store, redis, redis_prefix):
    await redis.set(RedisKeys(redis_prefix).image(DIGEST), b"another image", px=1000)

    assert await store.get(DIGEST) is None


async def test_a_known_image_is_kept_longer_without_its_bytes(
    store, redis, redis_prefix, monkeypatch
):
    key = RedisKeys(redis_prefix).image(DIGEST)
    await store.put_all([(DIGEST, IMAGE)], ttl_s=60)
    sent = []
    run = store._sender.run

    async def watch(script, keys, arguments):
        sent.append(arguments[1])
        return await run(script, keys, arguments)

    monkeypatch.setattr(store._sender, "run", watch)
    await store.put_all([(DIGEST, IMAGE)], ttl_s=600)
    assert await redis.ttl(key) > 500
    await store.put_all([(DIGEST, IMAGE)], ttl_s=1)
    assert await redis.ttl(key) > 500
    assert sent == [b"", b""]

    await redis.delete(key)
    await store.put_all([(DIGEST, IMAGE)], ttl_s=60)
    assert sent[2:] == [b"", IMAGE]
    assert await store.get(DIGEST) == IMAGE


async def test_workers_are_seen_until_they_fall_silent(registry, redis, redis_prefix):
    await registry.announce(make_record("w1"), ttl_s=60)
    await registry.announce(make_record("w2", "n"), ttl_s=60)
    assert {record.worker_id for record in await registry.workers()} == {"w1", "w2"}

    await redis.delete(RedisKeys(redis_prefix).worker("w2"))  # expired
    assert [record.worker_id for record in await registry.workers()] == ["w1"]
    await registry.withdraw("w1")

    assert await registry.workers() == []
    assert [card.name for card in await registry.models()] == ["m", "n"]


async def test_what_newer_workers_add_to_their_records_is_ignored(registry, redis, redis_prefix):
    keys = RedisKeys(redis_prefix)
    await registry.announce(make_record("w1", "m"), ttl_s=60)
    record, card = await redis.get(keys.worker("w1")), await redis.get(keys.model("m"))
    newer_record = record.replace(b'"card":{', b'"mood":"fine","card":{"colour":"red",')
    await redis.set(keys.worker("w1"), newer_record, px=60_000)
    await redis.set(keys.model("m"), card[:-1] + b',"colour":"red"}', px=60_000)

    assert await registry.workers() == [make_record("w1", "m")]
    assert await registry.models() == [make_record("w1", "m").card]


@pytest.mark.parametrize("junk", [b'{"worker_id":7}', b"no JSON", b"\xff"])
async def test_a_record_that_cannot_be_read_hides_no_other(
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
    assert len(told) == 2  # once each, however often it is looked at
    assert all("odd" in message for message in told)


async def test_an_image_goes_soon_after_the_last_request_that_needs_it(store, redis, redis_prefix):
    key = RedisKeys(redis_prefix).image(DIGEST)
    elsewhere = ImageStore(redis, redis_prefix)
    await store.put_all([(DIGEST, IMAGE)], ttl_s=300, holder="a")
    await elsewhere.put_all([(DIGEST, IMAGE)], ttl_s=200, holder="b")

    await store.release([DIGEST], holder="a")
    assert 190 < await redis.ttl(key) <= 200
    await store.release([DIGEST], holder="a")
    assert 190 < await redis.ttl(key) <= 200
    await elsewhere.release([DIGEST], holder="b")
    assert 0 < await redis.ttl(key) <= IMAGE_LINGER_S

    await store.put_all([(DIGEST, IMAGE)], ttl_s=300, holder="c")
    assert 290 < await redis.ttl(key) <= 300
    assert await store.get(DIGEST) == IMAGE
    await elsewhere.close()


async def test_releasing_never_keeps_an_image_longer(store, redis, redis_prefix):
    key = RedisKeys(redis_prefix).image(DIGEST)
    await store.put_all([(DIGEST, IMAGE)], ttl_s=2, holder="a")

    await store.release([DIGEST], holder="a")
    await store.release(["0" * 64], holder="a")

    assert await redis.pttl(key) <= 2000
    assert await redis.exists(RedisKeys(redis_prefix).image("0" * 64)) == 0


async def test_all_that_is_kept_expires(store, registry, redis, redis_prefix):
    await store.put_all([(DIGEST, IMAGE)], ttl_s=60)
    await registry.announce(make_record(), ttl_s=60)

    keys = [key async for key in redis.scan_iter(f"{redis_prefix}:*")]

    assert len(keys) == 6
    assert [key for key in keys if await redis.ttl(key) < 0] == []
