"""Blobs in Redis: stored by hash, and deleted soon after the last holder releases them."""

from hashlib import sha256

import pytest

from shared.blobs.api import BlobsUnavailable
from shared.blobs.redis_store import RedisBlobStore
from shared.protocol import BlobRef
from shared.queue.keys import BLOB_LINGER_S, RedisKeys
from shared.redis.client import create_redis
from shared.settings.tree import RedisSettings

DATA = b"an image"
REF = BlobRef(sha256(DATA).hexdigest(), len(DATA))


@pytest.fixture
async def store(redis, redis_prefix):
    store = RedisBlobStore(redis, redis_prefix)
    yield store
    await store.close()


async def test_bytes_that_do_not_match_their_hash_are_not_returned(store, redis, redis_prefix):
    await redis.set(RedisKeys(redis_prefix).blob(REF.sha256), b"another image", px=1000)
    assert await store.get(REF) is None


async def test_storing_known_bytes_extends_their_ttl_without_sending_them(
    store, redis, redis_prefix
):
    data = bytes(300_000)
    ref = await store.put(data, "a", ttl_s=60)
    key = RedisKeys(redis_prefix).blob(ref.sha256)

    async def num_received() -> int:
        return (await redis.info("stats"))["total_net_input_bytes"]

    before = await num_received()
    await store.put(data, "a", ttl_s=600)
    assert await redis.ttl(key) > 500
    await store.put(data, "a", ttl_s=1)
    assert await redis.ttl(key) > 500
    assert await num_received() < before + len(data) / 2

    await redis.delete(key)
    await store.put(data, "a", ttl_s=60)
    assert before + len(data) < await num_received() < before + 1.5 * len(data)
    assert await store.get(ref) == data


async def test_a_holder_releases_only_its_own_blobs(store, redis, redis_prefix):
    keys = RedisKeys(redis_prefix)
    mine = [await store.put(bytes([number]), "a", ttl_s=300) for number in range(3)]
    short = await store.put(b"short", "a", ttl_s=2)
    others = await store.put(b"other", "b", ttl_s=300)
    await store.release("a")
    await store.release("unknown")
    assert [await redis.ttl(keys.blob(ref.sha256)) <= BLOB_LINGER_S for ref in mine] == [True] * 3
    assert await redis.ttl(keys.blob(others.sha256)) > 290
    assert await redis.pttl(keys.blob(short.sha256)) <= 2000  # never extended


async def test_closing_the_store_completes_pending_releases(redis, redis_prefix):
    store = RedisBlobStore(redis, redis_prefix)
    await store.put(DATA, "a", ttl_s=300)
    store.release("a")
    await store.close()
    assert await redis.ttl(RedisKeys(redis_prefix).blob(REF.sha256)) <= BLOB_LINGER_S


async def test_a_store_that_is_down_is_an_error(tmp_path):
    redis = create_redis(RedisSettings(url=f"unix://{tmp_path}/nobody.sock"))
    store = RedisBlobStore(redis, "away")
    with pytest.raises(BlobsUnavailable):
        await store.put(DATA, "a", ttl_s=60)
    with pytest.raises(BlobsUnavailable):
        await store.get(REF)
    await store.release("a")  # runs in the background
    await store.close()
    await redis.aclose()
