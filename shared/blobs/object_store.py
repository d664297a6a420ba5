"""Large blobs in a directory or bucket, small ones in Redis.

Workers get a signed URL with the reference, so that they need no credentials. A lifecycle rule of the bucket deletes
old objects. `put` writes an object again if its last write is older than `RENEW_AFTER_S`.
"""

import asyncio
import io
import time
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from datetime import timedelta  # noqa: TID251
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any
from urllib.parse import unquote

import httpx
from msgspec.structs import replace

from shared.blobs.api import BlobStore, BlobsUnavailable, Ref, hash_of_file
from shared.blobs.redis_store import hash_of
from shared.protocol import BlobRef
from shared.settings import SettingsError, first_line

#: Blobs up to this size are stored in Redis, which has a lower latency.
MAX_REDIS_BYTES = 256 * 1024
RENEW_AFTER_S = 3600.0
_MAX_KNOWN = 10_000
_TIMEOUT_S = 10.0
_RETRIES: Any = {"max_retries": 2, "retry_timeout": timedelta(seconds=_TIMEOUT_S)}
_PROBE = "probe"
#: Sizes of an upload's parts, which are buffered: 1 MiB to a directory, 5 MiB (the minimum of S3) to a bucket.
_PART_BYTES, _MIN_PART_BYTES = 1 << 20, 5 << 20


class ObjectBlobStore:
    """A `BlobStore` with blobs up to `MAX_REDIS_BYTES` in the store `small`, others in a directory or bucket."""

    takes_files = True

    def __init__(self, small: BlobStore, url: str) -> None:
        """Raises: SettingsError if objects cannot be written and read."""
        try:
            import obstore  # noqa: PLC0415 (an extra)
            from obstore.store import from_url  # noqa: PLC0415
        except ModuleNotFoundError:
            raise _wrong("a package is missing: pip install '.[store]'") from None
        self._obstore = obstore
        self._small = small
        self._folder = unquote(url.removeprefix("file://")) if url.startswith("file://") else ""
        options: Any = {"mkdir": True} if self._folder else {"retry_config": _RETRIES}
        try:
            self._store: Any = from_url(url, **options)
            obstore.put(self._store, _PROBE, b"", use_multipart=False)
            obstore.get(self._store, _PROBE)
        except Exception as error:  # the only common base class of obstore's errors
            raise _wrong(f"{url}: {first_line(error)}") from None
        self._written: dict[str, float] = {}  # by hash: when this process wrote the object

    async def put(
        self, data: bytes | IO[bytes], holder: str, *, ttl_s: float, ref: BlobRef | None = None
    ) -> BlobRef:
        if ref is None:
            assert isinstance(data, bytes)
            ref = BlobRef(await hash_of(data), len(data))
        if ref.num_bytes <= MAX_REDIS_BYTES:
            return await self._small.put(data, holder, ttl_s=ttl_s, ref=ref)
        now = time.monotonic()
        written_at = self._written.get(ref.sha256)
        if written_at is not None and now - written_at < RENEW_AFTER_S:
            return ref
        size = _PART_BYTES if self._folder else _MIN_PART_BYTES
        options: Any = {"max_concurrency": 1, "chunk_size": size}
        if isinstance(data, bytes):
            options = {"use_multipart": False}
        else:
            data.seek(0)
        await self._try(self._obstore.put_async(self._store, ref.sha256, data, **options))
        self._written.pop(ref.sha256, None)  # so that the oldest entry stays first
        self._written[ref.sha256] = now
        if len(self._written) > _MAX_KNOWN:
            del self._written[next(iter(self._written))]
        return ref

    async def get(self, ref: BlobRef) -> bytes | None:
        return await self._small.get(ref)

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
            raise BlobsUnavailable(first_line(error)) from None


class UrlBlobReader:
    """Reads a blob from the URL in its reference, or from `store` if the reference has no URL."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._client: httpx.AsyncClient | None = None

    async def get(self, ref: BlobRef) -> bytes | None:
        """The bytes of a blob; None if the blob is missing or its hash differs. Raises: BlobsUnavailable."""
        if not ref.url:
            return await self._store.get(ref)
        file = await self.open(ref)
        if file is None:
            return None
        with file:
            return await asyncio.to_thread(file.read)

    async def open(self, ref: BlobRef) -> IO[bytes] | None:
        """Open a blob as a file, which is on disk if the blob has a URL. Returns None and raises as `get` does."""
        if not ref.url:
            data = await self._store.get(ref)
            return None if data is None else io.BytesIO(data)
        if ref.url.startswith("file://"):
            file = await asyncio.to_thread(_open_file, ref)
        else:
            file = await self._download(ref)
        if file is None or await asyncio.to_thread(hash_of_file, file) == ref.sha256:
            return file
        file.close()
        return None

    async def _download(self, ref: BlobRef) -> IO[bytes] | None:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=_TIMEOUT_S)
        with ExitStack() as stack:
            file = stack.enter_context(TemporaryFile())
            try:
                async with self._client.stream("GET", ref.url) as response:
                    if 400 <= response.status_code < 500:  # deleted, or the URL has expired
                        return None
                    response.raise_for_status()
                    async for piece in response.aiter_bytes():
                        file.write(piece)
                        if file.tell() > ref.num_bytes:
                            return None
            except httpx.HTTPError as error:
                raise BlobsUnavailable(f"the image store failed: {type(error).__name__}") from None
            stack.pop_all()  # the file stays open
            return file

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
        await self._store.close()


def _open_file(ref: BlobRef) -> IO[bytes] | None:
    """A blob's file; None if it is missing or its size differs. Raises: BlobsUnavailable."""
    path = Path(ref.url.removeprefix("file://"))
    try:
        return path.open("rb") if path.stat().st_size == ref.num_bytes else None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BlobsUnavailable(f"{path.parent}: {error.strerror}") from None


def _wrong(problem: str) -> SettingsError:
    return SettingsError(f"VLM_BLOBS__STORE: {problem}")
