"""Preparation of requests: fairness between tenants, cached images, and refused image sizes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from hashlib import sha256
from typing import Any

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from engines.base import Capabilities, Decode, EngineCall, InvalidImage, PreparedImage
from engines.core.engine import BatchingEngine
from engines.core.sequence import EngineRequest
from engines.registry import create_engine
from shared.blobs.object_store import UrlBlobReader
from shared.blobs.redis_store import RedisBlobStore
from shared.protocol import BlobRef, ChatMessage, ImageRef, TextPart
from shared.settings.limits import LimitSettings
from tests.factories_images import encoded, two_headed_png
from tests.factories_queue import make_request
from tests.factories_settings import make_group
from tests.waiting import until
from worker.prepare.preparer import FairThreads, ImageRefused, PixelCache, Preprocessor


class Store:
    """Stands in for the blob store: an image's bytes are its digest."""

    async def get(self, ref: BlobRef) -> bytes:
        return ref.sha256.encode()


class SlowEngine(BatchingEngine):
    """Each image waits for a permit; `order` records their names as they begin."""

    def __init__(self, names: dict[bytes, str]) -> None:
        self.names = names
        self.permits = threading.Semaphore(0)
        self.order: list[str] = []
        self.calls: list[EngineCall] = []

    def capabilities(self) -> Capabilities:
        return Capabilities(max_num_seqs=8)

    def prepare_image(self, data: bytes, image: ImageRef, decode: Decode) -> Any:
        self.order.append(self.names[data])
        assert self.permits.acquire(timeout=30)
        return data

    def prepare(self, call: EngineCall, images: Sequence[PreparedImage]) -> EngineRequest:
        self.calls.append(call)
        return EngineRequest(call.request_id, [1], call.task.sampling)


def image(name: str) -> ImageRef:
    return ImageRef(sha256(name.encode()).hexdigest(), 64, "image/png", 8, 8)


class Preparing:
    """A preprocessor with one image thread."""

    def __init__(self) -> None:
        self.names: dict[bytes, str] = {}
        self.engine = SlowEngine(self.names)
        self.preprocessor = Preprocessor(self.engine, UrlBlobReader(Store()), LimitSettings(), 1)  # type: ignore[arg-type]

    def start(self, tenant: str, *names: str, text: str = "hi") -> "asyncio.Task[Any]":
        images = tuple(image(name) for name in names)
        for ref, name in zip(images, names, strict=True):
            self.names[ref.sha256.encode()] = name
        messages = (ChatMessage("user", (TextPart(text),)),)
        request = make_request(images=images, tenant=tenant, messages=messages)
        return asyncio.create_task(self.preprocessor.prepare(request, "r"))


@pytest.fixture
def preparing():
    preparing = Preparing()
    yield preparing
    preparing.engine.permits.release(1000)
    preparing.preprocessor.close()


async def settle() -> None:
    """Lets every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_slow_images_of_one_tenant_delay_no_text_and_no_other_tenant(preparing: Preparing):
    slow = [preparing.start("a", *(f"{n}-{i}" for i in range(8))) for n in range(3)]
    await until(lambda: preparing.engine.order)
    async with asyncio.timeout(10):
        for tenant in ("a", "b"):
            await preparing.start(tenant, text="long " * 10_000)
    assert len(preparing.engine.order) == 1
    others = [preparing.start(tenant, f"of {tenant}") for tenant in ("b", "c")]
    await settle()
    preparing.engine.permits.release(24 + 2)
    await asyncio.gather(*others, *slow)
    # They run after one running image, one scheduled image, and each other.
    assert preparing.engine.order.index("of b") <= 2
    assert preparing.engine.order.index("of c") <= 4


async def test_an_image_scaled_to_other_sizes_has_another_hash(preparing: Preparing):
    ref = image("photo")
    preparing.names[ref.sha256.encode()] = "photo"
    preparing.engine.permits.release(4)
    images = (ref, *[replace(ref, max_pixels=100)] * 2, replace(ref, min_pixels=9))
    messages = (ChatMessage("user", (TextPart("hi"),)),)
    await preparing.preprocessor.prepare(make_request(images=images, messages=messages), "r")
    assert preparing.engine.order == ["photo"] * 3


async def test_the_engine_knows_whether_an_answer_is_streamed(preparing: Preparing):
    messages = (ChatMessage("user", (TextPart("hi"),)),)
    for wants_stream in (True, False):
        request = make_request(messages=messages, wants_stream=wants_stream)
        await preparing.preprocessor.prepare(request, "r")
    assert [call.is_streamed for call in preparing.engine.calls] == [True, False]


async def test_a_tenant_that_disconnects_does_not_delay_others():
    threads = FairThreads(1, "test")
    gate = threading.Event()
    first = asyncio.create_task(threads.run("a", lambda: gate.wait(10)))
    waiting = [asyncio.create_task(threads.run(tenant, lambda: 1)) for tenant in "abb"]
    await settle()
    first.cancel()  # its thread continues
    waiting[1].cancel()
    await settle()
    assert not waiting[0].done()
    gate.set()
    async with asyncio.timeout(10):
        assert await waiting[0] == await waiting[2] == 1
        assert await threads.run("c", lambda: 2) == 2
    threads.close()


class Maker:
    """Makes images of ten bytes and records their names."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def __call__(self, name: str):
        async def make() -> tuple[str, int]:
            self.made.append(name)
            await self.gate.wait()
            if name == "bad":
                raise ValueError(name)
            return name.upper(), 10

        return make


async def test_the_least_recently_used_image_is_evicted_first():
    cache, maker = PixelCache(max_bytes=20), Maker()
    for name in ("a", "b", "a", "c", "a", "b"):
        assert await cache.get(name, maker(name)) == name.upper()

    assert maker.made == ["a", "b", "c", "b"]


async def test_an_image_is_made_once_for_all_its_requests_unless_all_are_cancelled():
    cache, maker = PixelCache(max_bytes=100), Maker()
    maker.gate.clear()
    first, second, only = (asyncio.create_task(cache.get(name, maker(name))) for name in "aab")
    await settle()
    first.cancel()
    only.cancel()
    await settle()
    maker.gate.set()

    assert await second == "A"
    assert await cache.get("b", maker("b")) == "B"
    assert maker.made == ["a", "b", "b"]


@pytest.fixture
async def store(redis: Redis, redis_prefix: str) -> AsyncIterator[RedisBlobStore]:
    store = RedisBlobStore(redis, redis_prefix)
    yield store
    await store.close()


async def prepare(
    store: RedisBlobStore, data: bytes, width: int, height: int, **limits: Any
) -> None:
    """Prepares a request with an image of the size that a gateway found."""
    image = ImageRef(sha256(data).hexdigest(), len(data), "image/png", width, height)
    await store.put(data, "request", ttl_s=60)
    engine = create_engine({"kind": "mock"}).engine
    own = make_group(LimitSettings, **limits)
    with closing(Preprocessor(engine, UrlBlobReader(store), own, 1)) as preprocessor:
        await preprocessor.prepare(make_request(images=(image,)), "r")


async def test_an_image_whose_size_differs_from_its_header_is_refused(store: RedisBlobStore):
    with pytest.raises(ImageRefused, match="size of the image") as raised:
        await prepare(store, two_headed_png((8, 8), (1, 4000)), 8, 8)
    assert isinstance(raised.value.cause, InvalidImage)


async def test_a_worker_enforces_its_own_limits(store: RedisBlobStore):
    data = encoded(size=(80, 20))
    await prepare(store, data, 80, 20)
    with pytest.raises(ImageRefused, match="send at most") as raised:
        await prepare(store, data, 80, 20, max_image_pixels=1599)
    assert isinstance(raised.value.cause, InvalidImage)
