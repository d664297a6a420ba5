"""`/v1/batches`: run the requests in a file within a day, with lower priority than interactive requests.

`/v1/files`: store files for vector stores and batches, results of batches, and images.
Source: OpenAI API reference, "Batch", "Files".
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import chain, islice
from tempfile import SpooledTemporaryFile
from typing import IO, Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace
from starlette.responses import Response, StreamingResponse

from gateway.api.fields import Data, Listing, RequestStruct, copy_fields, invalid, missing, no_such
from gateway.api.vector_stores import Deleted, ListQuery, Metadata, PageQuery
from gateway.batches import FILE_ID, Batches, BatchFile, BatchFiles, BatchView, LineError
from gateway.calls.kept import IMAGE_ID, image_name
from gateway.calls.lifecycle import Lifecycle
from gateway.http.body import read_pieces
from gateway.http.endpoint import Caller, Resource, operation
from gateway.http.errors import InvalidRequest, NotFound, RateLimited, unavailable
from gateway.http.multipart import FormPart, FormReader
from gateway.search import SearchClient
from shared.packages.store import StoreError
from shared.records.store import Record
from shared.search import DropFile, FileRecord, ListFiles, PutFile, ReadFile, Request
from shared.settings.limits import (
    MAX_BATCH_FILES,
    MAX_FILENAME_CHARS,
    MAX_ITEM_ID_CHARS,
    LimitSettings,
)

PURPOSE = "batch"
T = TypeVar("T")
_Page = tuple[list["FileObject"], bool]  #: entries of a page, and whether more follow


class CreateBatch(RequestStruct, frozen=True, kw_only=True):
    input_file_id: Annotated[str, Meta(max_length=MAX_ITEM_ID_CHARS)]
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class RequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class BatchErrors(Data[LineError]):
    pass


class BatchObject(msgspec.Struct):
    """A batch in OpenAI's format. Units: epoch seconds."""

    id: str
    endpoint: str
    input_file_id: str
    status: str
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    metadata: dict[str, str] | None = None
    completion_window: str = "24h"
    object: str = "batch"

    @classmethod
    def of(cls, view: BatchView) -> "BatchObject":
        record, ending = view.record, view.ending
        completed, failed = view.counts
        total = 0 if view.beginning is None else view.beginning.total
        batch = copy_fields(
            record,
            cls,
            status=view.status,
            request_counts=RequestCounts(total, min(completed, total), min(failed, total)),
            in_progress_at=view.beginning and view.beginning.at,
            cancelling_at=view.cancel and view.cancel.at,
            finalizing_at=view.finalizing and view.finalizing.at,
        )
        if view.finalizing is not None and view.finalizing.errors:
            batch.errors = BatchErrors(view.finalizing.errors)
        if ending is not None:
            batch.output_file_id, batch.error_file_id = ending.output_file_id, ending.error_file_id
            setattr(batch, f"{view.status}_at", ending.at)
        return batch


class BatchList(Listing[BatchObject]):
    pass


@dataclass
class BatchResource(Resource):
    tag = "batches"

    _batches: Batches | None
    _wake_runner: Callable[[], None]
    _limits: LimitSettings
    _endpoints: Sequence[str]  #: paths that requests in a batch may call
    _find_guest: Callable[[str], str]  #: see `gateway.keys.directory.KeyDirectory.guest`
    _taking: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def _all(self) -> Batches:
        if self._batches is None:
            raise not_served()
        return self._batches

    @operation("POST", "/v1/batches")
    async def create_batch(self, caller: Caller, body: CreateBatch) -> BatchObject:
        """Create a batch."""
        batches, most = self._all, self._limits.max_open_batches
        if body.endpoint not in self._endpoints:
            raise invalid("endpoint", f"send one of {', '.join(self._endpoints)}")

        def create() -> BatchView | None:
            tenant, file_id = caller.context.tenant, body.input_file_id
            file = batches.files.get(caller.tenant, file_id)
            if file is None:
                problem = "no such file; upload it with purpose batch"
                raise invalid("input_file_id", problem, "not_found")
            if file.purpose != PURPOSE:
                problem = f"the file has another purpose; upload it with the purpose {PURPOSE}"
                raise invalid("input_file_id", problem)
            record = batches.create(
                caller.tenant, most, tenant=tenant, endpoint=body.endpoint, input_file_id=file_id,
                metadata=body.metadata, guest=self._find_guest(tenant),
            )  # fmt: skip
            if record is None:
                many = f"This key has {most} open batches: wait until one has ended, or cancel it."
                raise RateLimited("open_batches", many, retry_after_s=30)
            return batches.get(caller.tenant, record.id)

        async with self._taking:  # else concurrent requests could exceed the limit
            view = await blocking(create)
        self._wake_runner()
        return BatchObject.of(_found(view))

    @operation("GET", "/v1/batches")
    async def list_batches(self, caller: Caller, query: PageQuery) -> BatchList:
        """List batches."""
        batches = self._all

        def read() -> tuple[list[BatchView], bool]:
            ids = batches.ids(caller.tenant)[::-1]
            ids = [id_ for id_ in ids if not query.after or id_ < query.after]
            views = [batches.get(caller.tenant, id_) for id_ in ids[: query.limit]]
            return [view for view in views if view is not None], len(ids) > query.limit

        views, has_more = await blocking(read)
        return BatchList.of([BatchObject.of(view) for view in views], has_more)

    @operation("GET", "/v1/batches/{batch_id}")
    async def retrieve_batch(self, caller: Caller) -> BatchObject:
        """Retrieve a batch."""
        batches, id_ = self._all, caller.path["batch_id"]
        return BatchObject.of(_found(await blocking(lambda: batches.get(caller.tenant, id_))))

    @operation("POST", "/v1/batches/{batch_id}/cancel")
    async def cancel_batch(self, caller: Caller) -> BatchObject:
        """Cancel a batch. Finished answers are retained."""
        batches, id_ = self._all, caller.path["batch_id"]

        def cancel() -> BatchView | None:
            view = _found(batches.get(caller.tenant, id_))
            if view.ending is None:
                batches.cancel(view.record)
            return batches.get(caller.tenant, id_)

        view = await blocking(cancel)
        self._wake_runner()
        return BatchObject.of(_found(view))


async def blocking(work: Callable[[], T]) -> T:
    """Run `work`, which uses the batch store, in a thread. Raises: ApiError."""
    try:
        return await asyncio.to_thread(work)
    except StoreError:
        raise unavailable("files", "The store of files and batches is", 5) from None


def not_served() -> NotFound:
    return NotFound(
        "Batches are not served here: set VLM_GATEWAY__FILES to a directory or a bucket.",
        code="batches_not_served",
    )


def _found(view: BatchView | None) -> BatchView:
    if view is None:
        raise no_such("batch", "batch_id")
    return view


#: Purpose of media files that later requests refer to by id.
IMAGES = "vision"
PURPOSES = ("assistants", "user_data")
#: Purposes of files that gateways store; the search process stores files of other purposes.
BATCH_PURPOSES = (PURPOSE, "batch_output")
OWN_PURPOSES = (*BATCH_PURPOSES, IMAGES)
_FORM = "multipart/form-data"
_READ_S = 60.0  #: how long a signed URL for reading a stored image is valid
_MAX_MEMORY_BYTES = 1024 * 1024  #: larger uploaded files are written to disk
_MAX_FORM_BYTES = 64 * 1024  #: of a form without its file


class UploadForm(msgspec.Struct):
    """Fields of the form. `file`: UTF-8 text; for a batch, one JSON object per line; for `vision`, a media file."""

    file: str
    purpose: str


class FileObject(msgspec.Struct):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"

    @classmethod
    def of(cls, record: FileRecord | BatchFile) -> "FileObject":
        return copy_fields(record, cls, bytes=record.num_bytes)


class FileList(Listing[FileObject]):
    pass


class FilesQuery(ListQuery, frozen=True, kw_only=True):
    purpose: str = ""  #: empty: files of all purposes


@dataclass
class Files(Resource):
    tag = "files"

    _lifecycle: Lifecycle
    _search: SearchClient
    _batch_files: BatchFiles | None

    @operation("POST", "/v1/files", request_type=UploadForm, media_type=_FORM, is_upload=True)
    async def create_file(self, caller: Caller) -> FileObject:
        """Upload a file."""
        lifecycle, type_ = self._lifecycle, caller.context.headers.get(b"content-type", b"")
        limits, timeout_s = lifecycle.limits, lifecycle.settings.body_timeout_s
        most = limits.max_body_bytes
        open_file: Callable[[], IO[bytes]] = BytesIO
        if lifecycle.loader.uses_disk:
            medium = max(limits.max_video_bytes, limits.max_audio_bytes)
            most = max(most, medium + _MAX_FORM_BYTES)
            open_file = partial(SpooledTemporaryFile, max_size=_MAX_MEMORY_BYTES)
        pieces = read_pieces(
            caller.receive, caller.context, caller.held, most, timeout_s, _FORM.encode()
        )
        with FormReader(type_, open_file) as form:
            async for piece in pieces:
                form.feed(piece)
            return await self._create(caller, form.close())

    async def _create(self, caller: Caller, form: list[FormPart]) -> FileObject:
        fields = {part.name: part for part in form}
        if unknown := fields.keys() - {"file", "purpose"}:
            name = min(unknown)
            raise InvalidRequest(
                "Unsupported parameter: send only file and purpose.",
                param=name if name.isidentifier() and len(name) <= 64 else None,
                code="unsupported_parameter",
            )
        for name in ("file", "purpose"):
            if sum(part.name == name for part in form) > 1:
                raise InvalidRequest(f"Send one {name}.", param=name, code="invalid_form")
            if name not in fields:
                raise missing(name)
        purpose = fields["purpose"].data.decode(errors="replace")
        if purpose not in (*PURPOSES, PURPOSE, IMAGES):
            raise invalid("purpose", f"send {', '.join(PURPOSES)}, {IMAGES} or {PURPOSE}")
        file = fields["file"]
        num_bytes = file.file.tell()
        limits = self._lifecycle.limits
        most = limits.max_file_bytes if purpose in PURPOSES else limits.max_body_bytes
        if num_bytes > most and purpose != IMAGES:
            message = f"The file is too large: send at most {most} bytes."
            raise InvalidRequest(message, param="file", code="text_too_long")
        filename = "".join(c for c in file.filename or "" if c.isprintable())
        if not 0 < len(filename) <= MAX_FILENAME_CHARS:
            raise invalid("file", f"send a file name of 1 to {MAX_FILENAME_CHARS} characters")
        if purpose == PURPOSE:
            return FileObject.of(await self._create_for_batch(caller.tenant, filename, file.data))
        if purpose == IMAGES:
            return await self._create_image(caller.context.tenant, filename, file.file)
        put = PutFile(tenant=caller.tenant, filename=filename, purpose=purpose, data=file.data)
        return FileObject.of(await self._search.ask(put))

    async def _create_image(self, tenant: str, filename: str, content: IO[bytes]) -> FileObject:
        """Store an image. If an equal image is stored already, its id is returned and its expiry is renewed."""
        image = await self._lifecycle.loader.check(content, "file")
        name, now = image_name(tenant, image.ref.sha256), int(time.time())  # noqa: TID251
        file = FileObject(name, image.ref.num_bytes, now, filename, IMAGES)
        if not await self._lifecycle.kept.put_image(tenant, image, msgspec.json.encode(file)):
            message = "The image cannot be stored here: send it as a data: URL."
            raise InvalidRequest(message, param="file", code="store_full")
        return file

    async def _find_image(self, tenant: str, name: str) -> Record:
        record = await self._lifecycle.kept.get(tenant, name)
        if record is None:
            raise no_such("file", "file_id")
        return record

    async def _create_for_batch(self, owner: str, filename: str, data: bytes) -> BatchFile:
        files, most = self._files, self._lifecycle.limits.max_key_batch_bytes

        def check(num_more: int, num_more_bytes: int) -> None:
            num_files, num_bytes = files.usage(owner)
            if num_bytes + num_more_bytes > most or num_files + num_more > MAX_BATCH_FILES:
                raise InvalidRequest(
                    f"This key stores {num_files} batch files of {num_bytes} bytes: delete some. The limits "
                    f"are {MAX_BATCH_FILES} files and {most} bytes.",
                    param="file",
                    code="store_full",
                )

        def create() -> BatchFile:
            check(1, len(data))
            file = files.put(owner, filename, PURPOSE, [data], len(data))
            try:
                check(0, 0)  # concurrent uploads may have changed the counts
            except InvalidRequest:
                files.delete(owner, file)
                raise
            return file

        return await blocking(create)

    @operation("GET", "/v1/files")
    async def list_files(self, caller: Caller, query: FilesQuery) -> FileList:
        """List files. Without `purpose`: files of batches, then images, then files for vector stores."""
        return FileList.of(*await self._list(caller, query))

    async def _list(self, caller: Caller, query: FilesQuery) -> _Page:
        data, purpose = list[FileObject](), query.purpose
        if query.before and not purpose:  # only `after` works across the lists of all purposes
            raise invalid("before", "send `purpose` as well, or `after` instead")
        has_batches = self._batch_files is not None and purpose in ("", *BATCH_PURPOSES)
        has_others = self._search.is_on if purpose == "" else purpose not in OWN_PURPOSES
        for is_asked, prefix, find in (
            (has_batches, FILE_ID, self._list_for_batch),
            (purpose in ("", IMAGES), IMAGE_ID, self._list_images),
            (has_others, "", self._list_for_search),
        ):
            cursor, num_left = query.after or query.before, query.limit - len(data)
            if not is_asked or (cursor and not cursor.startswith(prefix)):
                continue
            page, has_more = await find(caller, replace(query, limit=max(1, num_left)))
            if num_left == 0 and page:
                return data, True
            data += page
            if has_more or query.before:
                return data, has_more
            query = replace(query, after="")
        return data, False

    async def _list_images(self, caller: Caller, query: FilesQuery) -> _Page:
        records = await self._lifecycle.kept.images(caller.context.tenant)
        return query.choose([msgspec.json.decode(r.data, type=FileObject) for r in records])

    async def _list_for_batch(self, caller: Caller, query: FilesQuery) -> _Page:
        files, is_ascending, owner = self._files, query.order == "asc", caller.tenant

        def read() -> tuple[list[BatchFile], bool]:
            ids = files.ids(owner)
            if not is_ascending:
                ids.reverse()
            if query.after:
                ids = [i for i in ids if (i > query.after if is_ascending else i < query.after)]
            if query.before:
                ids = [i for i in ids if (i < query.before if is_ascending else i > query.before)]
                ids.reverse()
            all_files = filter(None, (files.get(owner, id_) for id_ in ids))
            wanted = (file for file in all_files if query.purpose in ("", file.purpose))
            found = [*islice(wanted, query.limit + 1)]
            kept = found[: query.limit]
            return kept[::-1] if query.before else kept, len(found) > query.limit

        found, has_more = await blocking(read)
        return [FileObject.of(file) for file in found], has_more

    async def _list_for_search(self, caller: Caller, query: FilesQuery) -> _Page:
        asked = ListFiles(tenant=caller.tenant, page=query.page, purpose=query.purpose)
        records, has_more = query.cut(await self._search.ask(asked))
        return [FileObject.of(record) for record in records], has_more

    @operation("GET", "/v1/files/{file_id}")
    async def retrieve_file(self, caller: Caller) -> FileObject:
        """Retrieve a file."""
        name = caller.path["file_id"]
        if name.startswith(FILE_ID):
            return FileObject.of(await self._find(caller.tenant, name))
        if name.startswith(IMAGE_ID):
            record = await self._find_image(caller.context.tenant, name)
            return msgspec.json.decode(record.data, type=FileObject)
        return FileObject.of(await self._ask(ReadFile(tenant=caller.tenant, file=name)))

    @operation("GET", "/v1/files/{file_id}/content")
    async def download_file(self, caller: Caller) -> Response:
        """Retrieve the bytes of a file."""
        name = caller.path["file_id"]
        media_type = "application/octet-stream"
        if name.startswith(FILE_ID):
            files, file = self._files, await self._find(caller.tenant, name)
            length = {"content-length": str(file.num_bytes)}
            pieces = files.read(caller.tenant, file)
            first = await blocking(lambda: next(pieces, b""))  # a missing file raises here
            return StreamingResponse(chain([first], pieces), media_type=media_type, headers=length)
        if name.startswith(IMAGE_ID):
            [image] = (await self._find_image(caller.context.tenant, name)).images
            image = await self._lifecycle.blobs.locate(image, _READ_S)
            if not image.url:
                caller.held.add(image.num_bytes)
            stored = await self._lifecycle.kept.open(image)
            if stored is None:
                raise no_such("file", "file_id")
            length = {"content-length": str(image.num_bytes)}
            return StreamingResponse(_read(stored), media_type=image.media_type, headers=length)
        record = await self._ask(ReadFile(tenant=caller.tenant, file=name, with_data=True))
        return Response(record.data, media_type=media_type)

    @operation("DELETE", "/v1/files/{file_id}")
    async def delete_file(self, caller: Caller) -> Deleted:
        """Delete a file.

        Its chunks stay in the vector stores that it was attached to.
        """
        name = caller.path["file_id"]
        if name.startswith(FILE_ID):
            files, file = self._files, await self._find(caller.tenant, name)
            await blocking(lambda: files.delete(caller.tenant, file))
        elif name.startswith(IMAGE_ID):
            if not await self._lifecycle.kept.delete(caller.context.tenant, name):
                raise no_such("file", "file_id")
        else:
            await self._ask(DropFile(tenant=caller.tenant, file=name))
        return Deleted(name, "file")

    async def _ask(self, request: Request[T]) -> T:
        """Send a request to the search process. If it is off, only batch files and images exist. Raises: ApiError."""
        if self._batch_files is not None and not self._search.is_on:
            raise no_such("file", "file_id")
        return await self._search.ask(request)

    @property
    def _files(self) -> BatchFiles:
        if self._batch_files is None:
            raise not_served()
        return self._batch_files

    async def _find(self, owner: str, name: str) -> BatchFile:
        files = self._files
        file = await blocking(lambda: files.get(owner, name))
        if file is None:
            raise no_such("file", "file_id")
        return file


def _read(file: IO[bytes]) -> Iterator[bytes]:
    with file:
        yield from iter(partial(file.read, _MAX_MEMORY_BYTES), b"")
