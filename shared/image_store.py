"""Encoded pictures beside the queue, by the SHA-256 of their bytes.

Called by the gateway (put) and the worker (get). It must not know formats or pixels.
"""

import asyncio
import time
from collections.abc import Iterable
from hashlib import sha256

from redis.asyncio import Redis

from shared.redis_client import retry_idempotent
from shared.redis_keys import RedisKeys, to_ms
from shared.redis_link import RedisSender
from shared.scripts import PUT_IMAGE

MAX_REMEMBERED = 10_000
#: Up to that many bytes, hashing takes less time than handing it to another thread.
MAX_INLINE_BYTES = 256 * 1024


class ImageStore:
    """The pictures under one key prefix."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._keys = RedisKeys(prefix)
        self._sender = RedisSender(redis)
        self._known: dict[str, float] = {}  # by hash: until when the bytes are likely there

    async def put_all(self, images: Iterable[tuple[str, bytes]], ttl_s: float) -> None:
        """Keep pictures for at least `ttl_s`; bytes that are there already are not sent again.

        Raises: RedisError.
        """
        await asyncio.gather(*(self._put(digest, data, ttl_s) for digest, data in images))

    async def _put(self, digest: str, data: bytes, ttl_s: float) -> None:
        keys = (self._keys.image(digest),)
        now = time.monotonic()
        is_there = False
        if self._known.get(digest, 0.0) > now:
            is_there = await retry_idempotent(
                lambda: self._sender.run(PUT_IMAGE, keys, (to_ms(ttl_s), b""))
            )
        if not is_there:
            await retry_idempotent(lambda: self._sender.run(PUT_IMAGE, keys, (to_ms(ttl_s), data)))
        self._remember(digest, now + ttl_s)

    def _remember(self, digest: str, until: float) -> None:
        self._known.pop(digest, None)
        self._known[digest] = until
        if len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]

    async def get(self, digest: str) -> bytes | None:
        """A picture's bytes; None if they are not there or not those of the hash. Raises: RedisError."""
        data = await retry_idempotent(lambda: self._sender.execute("GET", self._keys.image(digest)))
        if data is None:
            return None
        if len(data) > MAX_INLINE_BYTES:
            actual = await asyncio.to_thread(_hash, data)
        else:
            actual = _hash(data)
        return data if actual == digest else None

    async def close(self) -> None:
        """Hang up."""
        await self._sender.close()


def _hash(data: bytes) -> str:
    return sha256(data).hexdigest()
