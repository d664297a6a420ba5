"""A worker decodes no image of another size than it was told, and of none beyond its own limits."""

from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import pytest
from redis.asyncio import Redis

from engines.base import InvalidImage
from engines.registry import create_engine
from shared.blobs.redis_store import RedisBlobStore
from shared.protocol import ImageRef
from shared.settings.limits import LimitSettings
from tests.factories_images import encoded, two_headed_png
from tests.factories_queue import make_request
from tests.factories_settings import make_group
from worker.prepare.preparer import ImageRefused, Preprocessor


@pytest.fixture
async def store(redis: Redis, redis_prefix: str) -> AsyncIterator[RedisBlobStore]:
    store = RedisBlobStore(redis, redis_prefix)
    yield store
    await store.close()


async def prepare(
    store: RedisBlobStore, data: bytes, width: int, height: int, **limits: Any
) -> None:
    """Prepare a request with an image that a gateway has found to be of a size."""
    image = ImageRef(sha256(data).hexdigest(), len(data), "image/png", width, height)
    await store.put(data, "request", ttl_s=60)
    engine = create_engine({"kind": "mock"}).engine
    preprocessor = Preprocessor(engine, store, make_group(LimitSettings, **limits), 1)
    try:
        await preprocessor.prepare(make_request(images=(image,)), "r")
    finally:
        preprocessor.close()


async def test_an_image_of_another_size_than_its_header_says_is_refused(store: RedisBlobStore):
    with pytest.raises(ImageRefused, match="another size") as raised:
        await prepare(store, two_headed_png((8, 8), (1, 4000)), 8, 8)
    assert isinstance(raised.value.cause, InvalidImage)


@pytest.mark.parametrize(
    "limits",
    [{"max_image_side": 79}, {"max_image_pixels": 1599}, {"max_image_aspect": 3.9}],
    ids=str,
)
async def test_limits_hold_for_what_a_gateway_with_others_let_through(
    store: RedisBlobStore, limits: dict[str, Any]
):
    data = encoded(size=(80, 20))
    await prepare(store, data, 80, 20)
    with pytest.raises(ImageRefused, match="send at most") as raised:
        await prepare(store, data, 80, 20, **limits)
    assert isinstance(raised.value.cause, InvalidImage)
