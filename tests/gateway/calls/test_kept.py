"""Stored answers hold their images; answers that are not stored do not."""

import pytest

from gateway.calls.kept import KeptAnswers
from shared.blobs.object_store import UrlBlobReader
from shared.blobs.redis_store import RedisBlobStore
from shared.protocol import BlobRef, ImageRef
from shared.queue.keys import BLOB_LINGER_S, RedisKeys
from shared.records.store import RecordStore

KEPT_S = 3600.0
IMAGE = b"an image"


@pytest.mark.parametrize(("max_bytes", "is_kept"), [(20, True), (19, False)])
async def test_an_answer_that_is_too_large_to_be_kept_holds_no_image(
    redis, redis_prefix, max_bytes, is_kept
):
    blobs = RedisBlobStore(redis, redis_prefix)
    records = RecordStore(redis, redis_prefix, ttl_s=KEPT_S, max_records=10, max_bytes=max_bytes)
    blob: BlobRef = await blobs.put(IMAGE, "request", ttl_s=5.0)
    image = ImageRef(blob.sha256, blob.num_bytes, "image/png", 1, 1)
    kept = KeptAnswers(records, blobs, UrlBlobReader(blobs).open, KEPT_S)
    await kept.put("tenant", "resp_1", b"x" * (20 - len(IMAGE)), (image,))
    assert (await kept.get("tenant", "resp_1") is not None) is is_kept
    await blobs.close()  # what was released is said by then
    left_s = await redis.ttl(RedisKeys(redis_prefix).blob(image.sha256))
    assert (left_s > BLOB_LINGER_S) is is_kept
    await records.close()
