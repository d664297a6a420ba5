"""`/v1/packages` and `/v1/blobs`: uploads of packages to the store. For deploy keys.

Blobs are streamed to the store while they arrive; an interrupted upload continues where it stopped.
"""

import asyncio
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, cast

import msgspec
from starlette.responses import Response
from starlette.types import Receive

from gateway.http.body import BodyTooSlow, PacedBody
from gateway.http.endpoint import Caller, Resource, operation
from gateway.http.errors import (
    ApiError,
    InvalidRequest,
    NotFound,
    RateLimited,
    conflict,
    record_unreadable,
    store_unavailable,
)
from shared.packages.deployments import Unreadable
from shared.packages.garbage import blobs_of, write_hold
from shared.packages.manifest import (
    MANIFEST_TYPE,
    MAX_PACKAGE_BYTES,
    BadPackage,
    decode_manifest,
    is_digest,
)
from shared.packages.store import PIECE_BYTES, BadBlob, PackageStore, StoreError, WrongStart
from shared.settings.limits import LimitSettings

logger = logging.getLogger(__name__)


@dataclass
class DeployResource(Resource):
    """A resource of the package store, for deploy keys."""

    tag = "applications"
    access = "deploy"

    _configured: PackageStore | None

    @property
    def _store(self) -> PackageStore:
        """Raises: NotFound."""
        if self._configured is None:
            raise NotFound(
                "Deployments are off: set VLM_DEPLOY__STORE for gateways and nodes.",
                code="deployments_off",
            )
        return self._configured

    def to_error(self, error: Exception) -> Exception:
        """The error for the client if the store fails; the cause is only logged."""
        if not isinstance(error, Unreadable | StoreError):
            return error
        logger.error("%s", error)
        return record_unreadable() if isinstance(error, Unreadable) else store_unavailable()


_MAX_UPLOADS = 4  #: concurrent uploads at full speed
_SLOW_RATE = 256 * 1024  #: bytes per second; a slower upload counts as slow
_MAX_THREADS = 64  #: fast and slow uploads of all keys
_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")


class MissingBlob(msgspec.Struct):
    """A file that the store lacks. `start`: number of the file's bytes that are stored already."""

    digest: str
    size: int
    start: int


class Plan(msgspec.Struct):
    """The files to upload. All files of the package are protected from deletion for a day."""

    digest: str
    missing: list[MissingBlob]


class _Body:
    """A request's body as a file object, which the store reads in a thread. Not seekable."""

    def __init__(self, receive: Receive, size: int, timeout_s: float) -> None:
        self._paced = PacedBody(receive, timeout_s)
        self._left = size
        self._loop = asyncio.get_running_loop()
        self._has_more = True
        self._reading: asyncio.Task[None] | None = None
        self._looked_at = (0, 0.0)
        self.error: ApiError | None = None  #: why the body ends early

    def seekable(self) -> bool:
        return False

    def read(self, size: int = -1) -> bytes:
        """Raises: OSError; `error` has the reason."""
        return asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()

    def cut(self, error: ApiError) -> None:
        """Make `read` raise."""
        self.error = self.error or error
        if self._reading is not None:
            self._reading.cancel()

    def is_slow(self, period_s: float) -> bool:
        """Whether the client sent less than `_SLOW_RATE` over the last `period_s`."""
        num_bytes, waited_s = self._looked_at
        self._looked_at = (self._paced.num_bytes, self._paced.waited_s)
        waited_s = self._paced.waited_s - waited_s
        has_waited = waited_s > period_s / 2  # otherwise the store is slow
        return has_waited and self._paced.num_bytes - num_bytes < waited_s * _SLOW_RATE

    async def _next(self) -> bytes:
        pieces = bytearray()
        self._reading = asyncio.ensure_future(self._read(pieces))
        await asyncio.wait([self._reading])
        if self.error is None:
            self._reading.result()
            self._left -= len(pieces)
            if self._left < 0 or (self._left and not self._has_more):
                self.error = _cut("the body's length differs from Content-Length")
        if self.error is not None:
            raise OSError(0, self.error.message)
        return bytes(pieces)

    async def _read(self, pieces: bytearray) -> None:
        while self._has_more and len(pieces) < PIECE_BYTES:
            try:
                message = await self._paced.receive()
            except BodyTooSlow as slow:
                self.error = _cut(slow.problem)
                return
            if message["type"] == "http.disconnect":
                self.error = _cut("the client disconnected")
                return
            pieces += message.get("body", b"")
            self._has_more = message.get("more_body", False)


def _cut(problem: str) -> ApiError:
    return InvalidRequest(f"The upload was cut: {problem}.", code="timeout")


class Packages(DeployResource):
    def __init__(self, store: PackageStore | None, timeout_s: float) -> None:
        super().__init__(store)
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(_MAX_UPLOADS)
        self._slow: Counter[str] = Counter()  # by API key: number of slow uploads
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "upload")

    @operation("POST", "/v1/packages", media_type=MANIFEST_TYPE)
    async def plan_upload(self, caller: Caller) -> Plan:
        """List the files of a package that the store lacks, and protect the package from deletion for a day."""
        store = self._store
        try:
            package = decode_manifest(caller.body)
        except BadPackage as error:
            raise InvalidRequest(f"{error}.", param="manifest", code="invalid_value") from None
        sizes = {layer.digest: layer.size for layer in package.layers}

        def look() -> Iterator[MissingBlob]:
            write_hold(store, blobs_of(package))
            for digest, size in sizes.items():
                if store.size(digest) != size:
                    yield MissingBlob(digest, size, store.partial(digest))

        return Plan(package.digest, await asyncio.to_thread(lambda: list(look())))

    @operation("HEAD", "/v1/blobs/{digest}")
    async def has_blob(self, caller: Caller) -> Response:
        """Show whether the store has a complete file. If not, `upload-offset` is the number of stored bytes."""
        digest, store = _check_digest(caller), self._store
        size = await asyncio.to_thread(store.size, digest)
        if size is not None:
            return Response(status_code=200, headers={"content-length": str(size)})
        start = await asyncio.to_thread(store.partial, digest)
        return Response(status_code=404, headers={"upload-offset": str(start)})

    @operation("PUT", "/v1/blobs/{digest}", media_type="application/octet-stream", is_upload=True)
    async def upload_blob(self, caller: Caller) -> Response:
        """Store a file, or with `Content-Range` the rest of an interrupted upload."""
        digest, key = _check_digest(caller), caller.context.tenant
        start, size = _extent(caller.context.headers)
        store = self._store
        body = _Body(caller.receive, size, self._timeout_s)
        try:
            async with self._places:
                writing = asyncio.get_running_loop().run_in_executor(
                    self._threads, store.put, digest, cast(IO[bytes], body), None, start
                )
                period_s = self._timeout_s / 10
                while not writing.done() and not body.is_slow(period_s):
                    await asyncio.wait([writing], timeout=period_s)
            self._slow[key] += 1
            try:
                if not writing.done() and self._slow[key] > LimitSettings.max_slow_uploads:
                    limit = LimitSettings.max_slow_uploads
                    message = f"Too many slow uploads: send at most {limit} files at a time."
                    body.cut(RateLimited("slow_uploads", message, retry_after_s=5))
                await writing
            finally:
                self._slow[key] -= 1
                self._slow += Counter()  # removes zeros
        except BadBlob as error:
            raise InvalidRequest(f"{error}.", code="digest_mismatch") from None
        except WrongStart:
            raise conflict("Cannot continue at this offset: HEAD returns upload-offset.") from None
        except StoreError:
            if body.error is None:
                raise
            raise body.error from None
        return Response(status_code=201)


def _extent(headers: Mapping[bytes, bytes]) -> tuple[int, int]:
    """Offset of the body in the blob, and the blob's size. Raises: InvalidRequest."""
    length = headers.get(b"content-length", b"")
    if not length.isdigit() or int(length) > MAX_PACKAGE_BYTES:
        raise InvalidRequest(
            f"Send Content-Length: at most {MAX_PACKAGE_BYTES} bytes.",
            status=411,
            code="invalid_http",
        )
    size, given = int(length), headers.get(b"content-range")
    if given is None:
        return 0, size
    match = _RANGE.fullmatch(given.decode("latin-1"))
    if match is None or int(match[2]) + 1 != int(match[3]) or int(match[3]) - int(match[1]) != size:
        raise InvalidRequest(
            "Invalid value for Content-Range: send `bytes START-LAST/SIZE` up to the blob's end.",
            code="invalid_value",
        )
    return int(match[1]), size


def _check_digest(caller: Caller) -> str:
    """Raises: InvalidRequest."""
    digest = caller.path["digest"]
    if not is_digest(digest):
        raise InvalidRequest(
            "Invalid value for digest: send sha256: and 64 hex digits.",
            param="digest",
            code="invalid_value",
        )
    return digest
