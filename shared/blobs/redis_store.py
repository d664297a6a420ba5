"""Stores blobs in the Redis server of the queue, or on its shards."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.blobs.api import BlobsUnavailable, Ref
from shared.protocol import BlobRef
from shared.queue.keys import BLOB_LINGER_S, RedisStore, to_ms
from shared.queue.shards import Shard, Shards
from shared.redis.client import load_script, named, redis_errors_as

logger = logging.getLogger(__name__)

_SCRIPTS = Path(__file__).parent / "scripts"
PUT_BLOB = load_script(_SCRIPTS / "put.lua")
RELEASE_BLOB = load_script(_SCRIPTS / "release.lua")

MAX_REMEMBERED = 10_000
#: Up to this many bytes, hashing in the event loop is faster than in a thread.
MAX_INLINE_BYTES = 256 * 1024
Result = TypeVar("Result")


@redis_errors_as(BlobsUnavailable)
class RedisBlobStore(RedisStore):
    """A `BlobStore` in Redis."""

    takes_files = False

    def __init__(self, redis: Redis, prefix: str) -> None:
        super().__init__(redis, prefix)
        self._known: dict[str, float] = {}  # by hash: earliest expiry of the bytes
        # by holder: when the holder expires, and the hashes of its blobs
        self._held: dict[str, tuple[float, set[str]]] = {}
        self._releasing: set[asyncio.Task[None]] = set()

    async def put(
        self, data: bytes | IO[bytes], holder: str, *, ttl_s: float, ref: BlobRef | None = None
    ) -> BlobRef:
        data = content_of(data)
        ref = ref or BlobRef(await hash_of(data), len(data))
        now = time.monotonic()
        self._note(holder, ref.sha256, now, ttl_s)
        is_likely_there = self._known.get(ref.sha256, 0.0) > now
        if not (is_likely_there and await self._put(b"", holder, ttl_s, ref)):
            await self._put(data, holder, ttl_s, ref)
        self._known.pop(ref.sha256, None)  # so that the oldest entry stays first
        self._known[ref.sha256] = now + ttl_s
        if len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        return ref

    async def _put(self, data: bytes, holder: str, ttl_s: float, ref: BlobRef) -> bool:
        """Returns True if the blob is stored now; with empty `data`, True if it was stored before."""
        keys = self._blob_keys(ref.sha256)
        return await self._run(PUT_BLOB, keys, data, ttl_ms=to_ms(ttl_s), holder=holder) == 1

    def _blob_keys(self, digest: str) -> tuple[str, str]:
        return self._keys.blob(digest), self._keys.blob_holders(digest)

    def _note(self, holder: str, digest: str, now: float, ttl_s: float) -> None:
        """Record that a holder has a blob, and remove expired holders."""
        while self._held:
            first = next(iter(self._held))
            if self._held[first][0] > now:
                break
            del self._held[first]
        _, digests = self._held.pop(holder, (0.0, set()))
        self._held[holder] = (now + ttl_s, digests | {digest})

    async def hold(self, ref: BlobRef, holder: str, *, ttl_s: float) -> bool:
        return await self._put(b"", holder, ttl_s, ref)

    async def locate(self, ref: Ref, ttl_s: float) -> Ref:
        return ref

    def release(self, holder: str, refs: Sequence[BlobRef] = ()) -> asyncio.Task[None]:
        _, digests = self._held.pop(holder, (0.0, set()))
        digests |= {ref.sha256 for ref in refs}
        task = asyncio.create_task(self._release(sorted(digests), holder), name="release blobs")
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)
        return task

    async def _release(self, digests: Sequence[str], holder: str) -> None:
        arguments = named(holder=holder, linger_ms=to_ms(BLOB_LINGER_S))
        calls = [
            self._sender.run(RELEASE_BLOB, self._blob_keys(digest), arguments) for digest in digests
        ]
        try:
            await asyncio.gather(*calls)
        except RedisError as error:
            logger.warning("cannot release %d blobs: %s", len(digests), error)

    async def get(self, ref: BlobRef) -> bytes | None:
        data = await self._ask("GET", self._keys.blob(ref.sha256))
        return data if data is not None and await hash_of(data) == ref.sha256 else None

    async def close(self) -> None:
        if self._releasing:
            await asyncio.wait(self._releasing)
        await super().close()


async def hash_of(data: bytes) -> str:
    """The SHA-256 of bytes; large data is hashed in a thread."""
    if len(data) <= MAX_INLINE_BYTES:
        return sha256(data).hexdigest()
    return await asyncio.to_thread(lambda: sha256(data).hexdigest())


def content_of(data: bytes | IO[bytes]) -> bytes:
    """The bytes of a blob, which is read from the beginning if it is a file."""
    if isinstance(data, bytes):
        return data
    data.seek(0)
    return data.read()


class ShardedBlobs:
    """A `BlobStore` over shards. The hash of a blob ranks the shards; the first shard that is up stores the blob."""

    takes_files = False

    def __init__(self, shards: Shards, prefix: str) -> None:
        self._shards = shards
        self._stores = {s.name: RedisBlobStore(s.redis, prefix) for s in shards.all}

    def _rank(self, digest: str) -> list[tuple[Shard, RedisBlobStore]]:
        """The stores of all shards, ranked for a blob; shards that are up come first."""
        ranked = sorted(self._shards.rank(digest), key=lambda shard: not shard.is_up)
        return [(shard, self._stores[shard.name]) for shard in ranked]

    async def put(
        self, data: bytes | IO[bytes], holder: str, *, ttl_s: float, ref: BlobRef | None = None
    ) -> BlobRef:
        data = content_of(data)
        ref = ref or BlobRef(await hash_of(data), len(data))
        shard, store = self._rank(ref.sha256)[0]
        return await shard.ask(store.put(data, holder, ttl_s=ttl_s, ref=ref), BlobsUnavailable)

    async def get(self, ref: BlobRef) -> bytes | None:
        return await self._first(ref, lambda store: store.get(ref))

    async def hold(self, ref: BlobRef, holder: str, *, ttl_s: float) -> bool:
        found = await self._first(ref, lambda store: store.hold(ref, holder, ttl_s=ttl_s))
        return bool(found)

    async def _first(
        self, ref: BlobRef, ask: Callable[[RedisBlobStore], Coroutine[Any, Any, Result]]
    ) -> Result | None:
        """The first true result of the shards. Shards that are lost count as empty.

        Raises: BlobsUnavailable if no result is true, and a shard did not answer.
        """
        failure = ""
        for shard, store in self._rank(ref.sha256):
            try:
                if found := await shard.ask(ask(store), BlobsUnavailable):
                    return found
            except BlobsUnavailable as error:
                if not shard.is_lost:
                    failure = str(error)
        if failure:
            raise BlobsUnavailable(failure)
        return None

    async def locate(self, ref: Ref, ttl_s: float) -> Ref:
        return ref

    def release(self, holder: str, refs: Sequence[BlobRef] = ()) -> Awaitable[Any]:
        return asyncio.gather(*(s.release(holder, refs) for s in self._stores.values()))

    async def close(self) -> None:
        await asyncio.gather(*(store.close() for store in self._stores.values()))
