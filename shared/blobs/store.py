"""Encoded images beside the queue, by the SHA-256 of their bytes, for as long as a request needs
them.

Called by the gateway (put, release) and the worker (get).
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from hashlib import sha256

from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.queue.keys import IMAGE_LINGER_S, RedisKeys, to_ms
from shared.queue.scripts import PUT_IMAGE, RELEASE_IMAGE, named
from shared.redis.client import retry_idempotent
from shared.redis.link import RedisSender

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 10_000
#: Up to that many bytes, hashing takes less time than handing it to another thread.
MAX_INLINE_BYTES = 256 * 1024


class ImageStore:
    """The images under one key prefix."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._keys = RedisKeys(prefix)
        self._sender = RedisSender(redis)
        self._known: dict[str, float] = {}  # by hash: until when the bytes are likely there
        self._releasing: set[asyncio.Task[None]] = set()

    async def put_all(
        self, images: Iterable[tuple[str, bytes]], ttl_s: float, holder: str = ""
    ) -> None:
        """Keep images until `holder` releases them, or else for at least `ttl_s`.

        Bytes that are there already are not sent again. Raises: RedisError.
        """
        await asyncio.gather(*(self._put(digest, data, ttl_s, holder) for digest, data in images))

    async def _put(self, digest: str, data: bytes, ttl_s: float, holder: str) -> None:
        keys = self._image_keys(digest)
        now = time.monotonic()
        is_there = False
        if self._known.get(digest, 0.0) > now:
            is_there = await retry_idempotent(
                lambda: self._sender.run(
                    PUT_IMAGE, keys, named(b"", ttl_ms=to_ms(ttl_s), holder=holder)
                )
            )
        if not is_there:
            await retry_idempotent(
                lambda: self._sender.run(
                    PUT_IMAGE, keys, named(data, ttl_ms=to_ms(ttl_s), holder=holder)
                )
            )
        self._remember(digest, now + ttl_s)

    def _image_keys(self, digest: str) -> tuple[str, str]:
        return self._keys.image(digest), self._keys.image_holders(digest)

    def _remember(self, digest: str, until: float) -> None:
        self._known.pop(digest, None)
        self._known[digest] = until
        if len(self._known) > MAX_REMEMBERED:
            del self._known[next(iter(self._known))]

    async def release(self, digests: Iterable[str], holder: str) -> None:
        """Say that a request needs its images no longer; what no other holds goes soon.

        Raises: RedisError; the images go at the end of their time then.
        """
        arguments = named(holder=holder, linger_ms=to_ms(IMAGE_LINGER_S))
        calls = (
            self._sender.run(RELEASE_IMAGE, self._image_keys(digest), arguments)
            for digest in digests
        )
        await asyncio.gather(*calls)

    def release_soon(self, digests: Iterable[str], holder: str) -> None:
        """`release`, for callers that do not wait; what Redis does not hear goes at the end of its time."""
        task = asyncio.create_task(self._try_release(list(digests), holder), name="release images")
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _try_release(self, digests: list[str], holder: str) -> None:
        try:
            await self.release(digests, holder)
        except RedisError as error:
            logger.warning("cannot release %d images: %s", len(digests), error)

    async def get(self, digest: str) -> bytes | None:
        """An image's bytes; None if they are not there or not those of the hash. Raises: RedisError."""
        data = await retry_idempotent(lambda: self._sender.execute("GET", self._keys.image(digest)))
        if data is None:
            return None
        if len(data) > MAX_INLINE_BYTES:
            actual = await asyncio.to_thread(_hash, data)
        else:
            actual = _hash(data)
        return data if actual == digest else None

    async def open(self) -> None:
        """Connect now rather than at the first image. Raises: RedisError."""
        await self._sender.execute("TIME")

    async def close(self) -> None:
        """Say what is still to be said, and hang up."""
        if self._releasing:
            await asyncio.wait(self._releasing)
        await self._sender.close()


def _hash(data: bytes) -> str:
    return sha256(data).hexdigest()
