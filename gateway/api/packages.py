"""`/v1/packages` and `/v1/blobs`: packages for the store, from who cannot reach it. For keys that may deploy.

A blob is streamed to the store while it is received; one that was cut goes on where it was.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, cast

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.types import Receive

from gateway.api.operator_access import OperatorAccess
from gateway.api.package_store import ConfiguredStore, store_unavailable
from gateway.http.body import BodyTooSlow, PacedBody
from gateway.http.errors import ApiError, InvalidRequest
from shared.packages.garbage import blobs_of, write_hold
from shared.packages.manifest import (
    MANIFEST_TYPE,
    MAX_PACKAGE_BYTES,
    BadPackage,
    decode_manifest,
    is_digest,
)
from shared.packages.resumable_file import PIECE_BYTES
from shared.packages.store import BadBlob, StoreError, WrongStart
from shared.settings.limits import LimitSettings

_MAX_UPLOADS = 4  #: that arrive fast, at a time
_SLOW_RATE = 256 * 1024  #: bytes a second; below it an upload is slow
_MAX_THREADS = 64  #: fast and slow uploads of all keys
_RANGE = re.compile(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15})")


class MissingBlob(msgspec.Struct):
    """A file that the store lacks. `start`: bytes of it that are there."""

    digest: str
    size: int
    start: int


class Plan(msgspec.Struct):
    """What is to be uploaded; it and what is there already stay for a day."""

    digest: str
    missing: list[MissingBlob]


class _Body:
    """A request's body as the store reads it, in a thread of its own. Not to be sought."""

    def __init__(self, receive: Receive, size: int, timeout_s: float) -> None:
        self._paced = PacedBody(receive, timeout_s)
        self._left = size
        self._loop = asyncio.get_running_loop()
        self._has_more = True
        self._reading: asyncio.Task[None] | None = None
        self._looked_at = (0, 0.0)
        self.error: ApiError | None = None  #: why the body has no more to read

    def seekable(self) -> bool:
        return False

    def read(self, size: int = -1) -> bytes:
        """Raises: OSError; `error` says why."""
        return asyncio.run_coroutine_threadsafe(self._next(), self._loop).result()

    def cut(self, error: ApiError) -> None:
        """End the reading, which raises."""
        self.error = self.error or error
        if self._reading is not None:
            self._reading.cancel()

    def is_slow(self, period_s: float) -> bool:
        """Whether the client sent less than `_SLOW_RATE` since the last look, `period_s` ago."""
        num_bytes, waited_s = self._looked_at
        self._looked_at = (self._paced.num_bytes, self._paced.waited_s)
        waited_s = self._paced.waited_s - waited_s
        has_waited = waited_s > period_s / 2  # else the store is the slow one
        return has_waited and self._paced.num_bytes - num_bytes < waited_s * _SLOW_RATE

    async def _next(self) -> bytes:
        pieces = bytearray()
        self._reading = asyncio.ensure_future(self._read(pieces))
        await asyncio.wait([self._reading])
        if self.error is None:
            self._reading.result()
            self._left -= len(pieces)
            if self._left < 0 or (self._left and not self._has_more):
                self.error = _cut("its length is not that of Content-Length")
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
                self.error = _cut("the client has left")
                return
            pieces += message.get("body", b"")
            self._has_more = message.get("more_body", False)


def _cut(problem: str) -> ApiError:
    return InvalidRequest(f"The upload was cut: {problem}.", status=408, code="timeout")


class Uploads:
    """Keeps what is sent."""

    def __init__(self, store: ConfiguredStore, body_timeout_s: float) -> None:
        self._store = store
        self._timeout_s = body_timeout_s
        self._places = asyncio.Semaphore(_MAX_UPLOADS)
        self._slow: Counter[str] = Counter()  # uploads that gave their place back, by key
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "upload")

    async def plan(self, manifest: bytes) -> Plan:
        """What the store lacks of a package. Raises: ApiError, StoreError."""
        store = await self._store.open()
        try:
            package = decode_manifest(manifest)
        except BadPackage as error:
            raise InvalidRequest(f"{error}.", param="manifest", code="invalid_value") from None
        sizes = {layer.digest: layer.size for layer in package.layers}

        def look() -> Iterator[MissingBlob]:
            write_hold(store, blobs_of(package))
            for digest, size in sizes.items():
                if store.size(digest) != size:
                    yield MissingBlob(digest, size, store.partial(digest))

        return Plan(package.digest, await asyncio.to_thread(lambda: list(look())))

    async def put(self, key: str, digest: str, receive: Receive, start: int, size: int) -> None:
        """Keep a blob of a key, from `start` on. Raises: ApiError, StoreError."""
        store = await self._store.open()
        body = _Body(receive, size, self._timeout_s)
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
                    body.cut(TooManySlowUploads())
                await writing
            finally:
                self._slow[key] -= 1
                self._slow += Counter()  # drops zeros
        except BadBlob as error:
            raise InvalidRequest(f"{error}.", code="digest_mismatch") from None
        except WrongStart:
            raise InvalidRequest(
                "The upload cannot go on there: HEAD says from where.",
                status=409,
                code="conflict",
            ) from None
        except StoreError:
            if body.error is None:
                raise
            raise body.error from None


class TooManySlowUploads(ApiError):
    """A key's uploads beyond the limit on slow ones."""

    status = 429
    type = "rate_limit_error"

    def __init__(self) -> None:
        limit = LimitSettings.max_slow_uploads
        super().__init__(
            f"Too many slow uploads: send at most {limit} files at a time.",
            code="rate_limit_exceeded",
            retry_after_s=5,
        )


def create_package_routes(access: OperatorAccess, store_url: str, timeout_s: float) -> APIRouter:
    """The operations."""
    configured = ConfiguredStore(store_url)
    uploads = Uploads(configured, timeout_s)
    router = APIRouter(prefix="/v1", tags=["applications"])

    @router.post("/packages", operation_id="plan_upload", openapi_extra=_MANIFEST)
    async def plan_upload(request: Request) -> Response:
        """Say which files of a package the store lacks, and keep it from being collected for a day."""
        body = await access.read_bytes(request, MANIFEST_TYPE.encode())
        with store_unavailable():
            found = await uploads.plan(body)
        return Response(msgspec.json.encode(found), media_type="application/json")

    @router.head("/blobs/{digest}", operation_id="has_blob", openapi_extra=_RESPONSES)
    async def has_blob(request: Request, digest: str) -> Response:
        """Whether the store has a file; else `upload-offset` says how much of it there is."""
        access.check(request)
        _check_digest(digest)
        with store_unavailable():
            store = await configured.open()
            size = await asyncio.to_thread(store.size, digest)
            if size is not None:
                return Response(status_code=200, headers={"content-length": str(size)})
            start = await asyncio.to_thread(store.partial, digest)
        return Response(status_code=404, headers={"upload-offset": str(start)})

    @router.put("/blobs/{digest}", operation_id="upload_blob", openapi_extra=_BLOB)
    async def upload_blob(request: Request, digest: str) -> Response:
        """Keep a file, or with `Content-Range` the rest of one whose upload was cut."""
        key = access.check(request)
        _check_digest(digest)
        start, size = _extent(request)
        with store_unavailable():
            await uploads.put(key, digest, request.receive, start, size)
        return Response(status_code=201)

    return router


def _extent(request: Request) -> tuple[int, int]:
    """Where the body begins in the blob, and its size. Raises: InvalidRequest."""
    length = request.headers.get("content-length", "")
    if not length.isascii() or not length.isdigit() or int(length) > MAX_PACKAGE_BYTES:
        raise InvalidRequest(
            f"Send Content-Length: at most {MAX_PACKAGE_BYTES} bytes.",
            status=411,
            code="invalid_http",
        )
    size, given = int(length), request.headers.get("content-range")
    if given is None:
        return 0, size
    match = _RANGE.fullmatch(given)
    if match is None or int(match[2]) + 1 != int(match[3]) or int(match[3]) - int(match[1]) != size:
        raise InvalidRequest(
            "Invalid value for Content-Range: send `bytes START-LAST/SIZE` up to the blob's end.",
            code="invalid_value",
        )
    return int(match[1]), size


def _check_digest(digest: str) -> None:
    if not is_digest(digest):
        raise InvalidRequest(
            "Invalid value for digest: send sha256: and 64 hex digits.",
            param="digest",
            code="invalid_value",
        )


_RESPONSES: dict[str, Any] = {
    "responses": {
        "400": {"description": "The bytes are of another digest, or a field cannot be."},
        "403": {"description": "The key may not deploy."},
        "404": {"description": "There is no such file, or deployments are off."},
        "409": {"description": "An upload cannot go on where it is asked to."},
        "408": {"description": "The body stopped, or came too slowly."},
        "411": {"description": "The body has no length."},
        "429": {"description": "The key has too many slow uploads."},
        "503": {"description": "The store of packages is away."},
    }
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_MANIFEST = {**_RESPONSES, "requestBody": {"required": True, "content": {MANIFEST_TYPE: _BINARY}}}
_BLOB = {
    **_RESPONSES,
    "requestBody": {"required": True, "content": {"application/octet-stream": _BINARY}},
}
