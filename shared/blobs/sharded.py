"""Blobs on the shards of a queue."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import IO, Any, TypeVar

from shared.blobs.api import BlobsUnavailable, Ref
from shared.blobs.redis_store import RedisBlobStore, content_of, hash_of
from shared.protocol import BlobRef
from shared.queue.shards import Shard, Shards

Result = TypeVar("Result")


class ShardedBlobs:
    """A `BlobStore` over shards. The hash of a blob ranks the shards, and the first one that is up stores it."""

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

    async def open(self) -> None:
        await asyncio.gather(*(s.open() for s in self._stores.values()), return_exceptions=True)

    async def close(self) -> None:
        await asyncio.gather(*(store.close() for store in self._stores.values()))
