"""Large blobs in a directory or bucket: workers read them by a signed URL, without credentials."""

import asyncio
import io
import os
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from uuid import uuid4

import pytest
from msgspec.structs import replace

from shared.blobs.api import BlobsUnavailable
from shared.blobs.object_store import MAX_REDIS_BYTES, ObjectBlobStore, UrlBlobReader
from shared.blobs.redis_store import RedisBlobStore
from shared.protocol import BlobRef

obstore = pytest.importorskip("obstore")
from_url = pytest.importorskip("obstore.store").from_url
LARGE = os.urandom(MAX_REDIS_BYTES + 1)
REF = BlobRef(sha256(LARGE).hexdigest(), len(LARGE))


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path / 'images'}"
    return request.getfixturevalue("s3_url") + f"/{uuid4().hex}"


@pytest.fixture
async def make(redis, redis_prefix):
    stores = []

    def make(url: str) -> ObjectBlobStore:
        stores.append(ObjectBlobStore(RedisBlobStore(redis, redis_prefix), url))
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


@pytest.fixture
async def reader(redis, redis_prefix):
    reader = UrlBlobReader(RedisBlobStore(redis, redis_prefix))
    yield reader
    await reader.close()


async def test_a_worker_reads_a_large_blob_by_url_unless_it_was_changed(
    make, url, reader, redis, redis_prefix
):
    stores = make(url), make(url)  # the stores of two gateways
    refs = await asyncio.gather(*(store.put(LARGE, "a", ttl_s=60) for store in stores))
    assert refs == [REF, REF]
    located = await stores[0].locate(REF, 60.0)
    assert located.url
    assert await reader.get(located) == LARGE
    assert [key async for key in redis.scan_iter(f"{redis_prefix}:*")] == []
    assert await stores[1].hold(REF, "b", ttl_s=60)
    obstore.put(from_url(url), REF.sha256, LARGE[::-1])
    assert await reader.get(located) is None


async def test_a_file_is_stored_in_parts_and_read_as_a_file(make, url, reader):
    """The file is larger than two parts of a multipart upload."""
    data = os.urandom(12 * 1024 * 1024)
    ref = BlobRef(sha256(data).hexdigest(), len(data))
    with TemporaryFile() as file:
        file.write(data)
        store = make(url)
        for _ in range(2):
            assert await store.put(file, "a", ttl_s=60, ref=ref) == ref
    located = await store.locate(ref, 60.0)
    with await reader.open(located) as read:
        assert read.fileno()
        assert read.read() == data
    obstore.put(from_url(url), ref.sha256, data[::-1])
    assert await reader.open(located) is None


async def test_small_blobs_are_stored_in_redis(make, url, reader):
    store, ref = make(url), BlobRef(sha256(b"small").hexdigest(), 5)
    assert await store.put(b"small", "a", ttl_s=60) == ref
    assert await store.put(io.BytesIO(b"small"), "a", ttl_s=60, ref=ref) == ref
    assert await store.locate(ref, 60.0) == ref
    assert await reader.get(ref) == b"small"
    assert (await reader.open(ref)).read() == b"small"


async def test_a_blob_is_written_once_per_hour_unless_it_is_missing(make, url, reader):
    """The bucket's lifecycle rule counts from the last write."""
    store, bucket = make(url), from_url(url)
    await store.put(LARGE, "a", ttl_s=60)
    obstore.put(bucket, REF.sha256, b"as it was written")
    for _ in range(3):
        await store.put(LARGE, "a", ttl_s=60)
    assert bytes(obstore.get(bucket, REF.sha256).bytes()) == b"as it was written"
    obstore.delete(bucket, REF.sha256)
    assert not await store.hold(REF, "a", ttl_s=60)
    assert await reader.get(await store.locate(REF, 60.0)) is None
    await store.put(LARGE, "a", ttl_s=60)
    assert await reader.get(await store.locate(REF, 60.0)) == LARGE


async def test_a_signed_url_expires(make, s3_url, reader):
    store = make(s3_url + "/expires")
    await store.put(LARGE, "a", ttl_s=60)
    located = await store.locate(REF, 1.0)
    assert await reader.get(located) == LARGE
    assert "X-Amz-Expires=1&" in located.url


async def test_a_store_that_is_down_is_an_error(make, tmp_path, reader):
    store = make(f"file://{tmp_path / 'images'}")
    (tmp_path / "images").rename(tmp_path / "elsewhere")
    (tmp_path / "images").write_text("not a directory")
    with pytest.raises(BlobsUnavailable):
        await store.put(LARGE, "a", ttl_s=60)
    for url in ((await store.locate(REF, 60.0)).url, "http://127.0.0.1:9/nobody"):
        with pytest.raises(BlobsUnavailable):
            await reader.get(replace(REF, url=url))
