"""Large blobs in a directory or bucket, small ones in Redis.

Workers get a signed URL with the reference, so that they need no credentials. Objects expire by a lifecycle rule of
the bucket: they are written again when their last write is older than `RENEW_AFTER_S`.
"""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from datetime import timedelta  # noqa: TID251
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
from msgspec.structs import replace

from shared.blobs.api import BlobStore, BlobsUnavailable, Ref
from shared.blobs.redis_store import hash_of
from shared.protocol import BlobRef
from shared.settings import SettingsError

#: Blobs up to this size are stored in Redis, which has a lower latency.
MAX_REDIS_BYTES = 256 * 1024
RENEW_AFTER_S = 3600.0
_MAX_KNOWN = 10_000
_TIMEOUT_S = 10.0
_RETRIES: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=_TIMEOUT_S)}
_PROBE = "probe"


class ObjectBlobStore:
    """A `BlobStore` over `small`, and a directory or bucket for blobs above `MAX_REDIS_BYTES`."""

    def __init__(self, small: BlobStore, url: str) -> None:
        """Raises: SettingsError if objects cannot be written and read."""
        try:
            import obstore  # noqa: PLC0415 (an extra)
            from obstore.store import from_url  # noqa: PLC0415
        except ModuleNotFoundError:
            raise _wrong("it needs a package: pip install 'vlm-fleet[store]'") from None
        self._obstore = obstore
        self._small = small
        self._folder = unquote(url.removeprefix("file://")) if url.startswith("file://") else ""
        options: Any = {"mkdir": True} if self._folder else {"retry_config": _RETRIES}
        try:
            self._store: Any = from_url(url, **options)
            obstore.put(self._store, _PROBE, b"", use_multipart=False)
            obstore.get(self._store, _PROBE)
        except Exception as error:  # obstore's errors have no common base but Exception
            raise _wrong(f"{url}: {_first_line(error)}") from None
        self._written: dict[str, float] = {}  # by hash: when this process wrote the object

    async def open(self) -> None:
        await self._small.open()

    async def put(
        self, data: bytes, holder: str, *, ttl_s: float, ref: BlobRef | None = None
    ) -> BlobRef:
        if len(data) <= MAX_REDIS_BYTES:
            return await self._small.put(data, holder, ttl_s=ttl_s, ref=ref)
        ref = ref or BlobRef(await hash_of(data), len(data))
        now = time.monotonic()
        written_at = self._written.get(ref.sha256)
        if written_at is not None and now - written_at < RENEW_AFTER_S:
            return ref
        await self._try(self._obstore.put_async(self._store, ref.sha256, data, use_multipart=False))
        self._written.pop(ref.sha256, None)  # keeps the oldest entry first
        self._written[ref.sha256] = now
        if len(self._written) > _MAX_KNOWN:
            del self._written[next(iter(self._written))]
        return ref

    async def get(self, ref: BlobRef) -> bytes | None:
        if ref.num_bytes <= MAX_REDIS_BYTES:
            return await self._small.get(ref)
        try:
            found = await self._try(self._obstore.get_async(self._store, ref.sha256))
        except FileNotFoundError:
            self._written.pop(ref.sha256, None)
            return None
        return await _checked(bytes(await self._try(found.bytes_async())), ref)

    async def hold(self, ref: BlobRef, holder: str, *, ttl_s: float) -> bool:
        if ref.num_bytes <= MAX_REDIS_BYTES:
            return await self._small.hold(ref, holder, ttl_s=ttl_s)
        try:
            await self._try(self._obstore.head_async(self._store, ref.sha256))
        except FileNotFoundError:
            self._written.pop(ref.sha256, None)
            return False
        return True

    async def locate(self, ref: Ref, ttl_s: float) -> Ref:
        if ref.num_bytes <= MAX_REDIS_BYTES:
            return ref
        if self._folder:
            return replace(ref, url=f"file://{self._folder}/{ref.sha256}")
        lives = timedelta(seconds=ttl_s)
        signing = self._obstore.sign_async(self._store, "GET", ref.sha256, lives)
        return replace(ref, url=await self._try(signing))

    def release(self, holder: str, refs: Sequence[BlobRef] = ()) -> Awaitable[None]:
        return self._small.release(holder, [r for r in refs if r.num_bytes <= MAX_REDIS_BYTES])

    async def close(self) -> None:
        await self._small.close()

    async def _try(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except FileNotFoundError:
            raise
        except Exception as error:
            raise BlobsUnavailable(_first_line(error)) from None


class UrlBlobReader:
    """A `BlobReader` that reads a blob from the URL in its reference, or from Redis if it has none."""

    def __init__(self, redis: BlobStore) -> None:
        self._redis = redis
        self._client: httpx.AsyncClient | None = None

    async def get(self, ref: BlobRef) -> bytes | None:
        if not ref.url:
            return await self._redis.get(ref)
        if ref.url.startswith("file://"):
            data = await asyncio.to_thread(_read_file, ref)
            return None if data is None else await _checked(data, ref)
        return await self._download(ref)

    async def _download(self, ref: BlobRef) -> bytes | None:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=_TIMEOUT_S)
        data = bytearray()
        try:
            async with self._client.stream("GET", ref.url) as response:
                if 400 <= response.status_code < 500:  # deleted, or the URL has expired
                    return None
                response.raise_for_status()
                async for piece in response.aiter_bytes():
                    data += piece
                    if len(data) > ref.num_bytes:
                        return None
        except httpx.HTTPError as error:
            raise BlobsUnavailable(f"the store of images: {type(error).__name__}") from None
        return await _checked(bytes(data), ref)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
        await self._redis.close()


def _read_file(ref: BlobRef) -> bytes | None:
    """The content of a blob's file; None if the file is missing or its size differs. Raises: BlobsUnavailable."""
    path = Path(ref.url.removeprefix("file://"))
    try:
        return path.read_bytes() if path.stat().st_size == ref.num_bytes else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BlobsUnavailable(f"{path.parent}: {error.strerror}") from None


async def _checked(data: bytes, ref: BlobRef) -> bytes | None:
    return data if await hash_of(data) == ref.sha256 else None


def _wrong(problem: str) -> SettingsError:
    return SettingsError(f"VLM_BLOBS__STORE: {problem}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]
