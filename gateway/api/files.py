"""`/v1/files`: files that clients upload, to attach them to vector stores.

Source: OpenAI API reference, "Files".
"""

import msgspec
from fastapi import Response

from gateway.api.fields import invalid
from gateway.api.routes import Caller, Operation
from gateway.api.vector_stores import Deleted, ListQuery
from gateway.http.errors import InvalidRequest
from gateway.http.multipart import read_form
from gateway.search import SearchClient
from shared.search import DropFile, FileRecord, ListFiles, PutFile, ReadFile
from shared.settings.limits import MAX_FILENAME_CHARS, LimitSettings

PURPOSES = ("assistants", "user_data")


class UploadForm(msgspec.Struct):
    """The fields of the form. `file`: text in UTF-8."""

    file: str
    purpose: str


class FileObject(msgspec.Struct):
    """OpenAI's object."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    object: str = "file"
    status: str = "processed"

    @classmethod
    def of(cls, record: FileRecord) -> "FileObject":
        """Of what the search process knows."""
        return cls(record.id, record.num_bytes, record.created_at, record.filename, record.purpose)


class FileList(msgspec.Struct):
    """A page of files."""

    data: list[FileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class FilesQuery(ListQuery, frozen=True, kw_only=True):
    """Which part of a list, of one purpose or any."""

    purpose: str = ""


class Files:
    """The operations on files."""

    def __init__(self, search: SearchClient, limits: LimitSettings) -> None:
        self._search = search
        self._limits = limits

    def operations(self) -> list[Operation]:
        """All that is served."""
        file = "/v1/files/{file_id}"
        return [
            Operation("POST", "/v1/files", "create_file", "Upload a file", self.create, FileObject,
                      UploadForm, tag="files", media_type="multipart/form-data"),
            Operation("GET", "/v1/files", "list_files", "List files", self.list_files, FileList,
                      query=FilesQuery, tag="files"),
            Operation("GET", file, "retrieve_file", "Retrieve a file", self.retrieve, FileObject,
                      tag="files"),
            Operation("GET", file + "/content", "download_file", "Retrieve the bytes of a file",
                      self.content, None, tag="files"),
            Operation("DELETE", file, "delete_file", "Delete a file", self.delete, Deleted,
                      tag="files"),
        ]  # fmt: skip

    async def create(self, caller: Caller) -> FileObject:
        """`POST /v1/files`"""
        form = read_form(caller.body, caller.context.headers[b"content-type"])
        fields = {part.name: part for part in form}
        if unknown := fields.keys() - {"file", "purpose"}:
            name = min(unknown)
            raise InvalidRequest(
                "Unsupported parameter: send file and purpose alone.",
                param=name if name.isidentifier() and len(name) <= 64 else None,
                code="unsupported_parameter",
            )
        for name in ("file", "purpose"):
            if sum(part.name == name for part in form) > 1:
                raise InvalidRequest(f"Send one {name}.", param=name, code="invalid_form")
            if name not in fields:
                raise InvalidRequest(
                    f"Missing required field: {name}.", param=name, code="missing_field"
                )
        purpose = fields["purpose"].data.decode(errors="replace")
        if purpose not in PURPOSES:
            raise invalid("purpose", f"send {' or '.join(PURPOSES)}")
        file, most = fields["file"], self._limits.max_file_bytes
        if len(file.data) > most:
            raise InvalidRequest(
                f"The file is too large: send at most {most} bytes.",
                param="file",
                status=413,
                code="text_too_long",
            )
        filename = "".join(c for c in file.filename or "" if c.isprintable())
        if not 0 < len(filename) <= MAX_FILENAME_CHARS:
            raise invalid("file", f"send a file name of 1 to {MAX_FILENAME_CHARS} characters")
        put = PutFile(tenant=caller.tenant, filename=filename, purpose=purpose, data=file.data)
        return FileObject.of(await self._search.ask(put, FileRecord))

    async def list_files(self, caller: Caller) -> FileList:
        """`GET /v1/files`"""
        query = caller.read_query(FilesQuery)
        asked = ListFiles(tenant=caller.tenant, page=query.page, purpose=query.purpose)
        records, has_more = query.cut(await self._search.ask(asked, list[FileRecord]))
        data = [FileObject.of(record) for record in records]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return FileList(data, has_more, *ends)

    async def retrieve(self, caller: Caller) -> FileObject:
        """`GET /v1/files/{id}`"""
        asked = ReadFile(tenant=caller.tenant, file=caller.path["file_id"])
        return FileObject.of(await self._search.ask(asked, FileRecord))

    async def content(self, caller: Caller) -> Response:
        """`GET /v1/files/{id}/content`"""
        asked = ReadFile(tenant=caller.tenant, file=caller.path["file_id"], with_data=True)
        record = await self._search.ask(asked, FileRecord)
        return Response(record.data, media_type="application/octet-stream")

    async def delete(self, caller: Caller) -> Deleted:
        """`DELETE /v1/files/{id}`: its chunks stay in the stores that it was attached to."""
        name = caller.path["file_id"]
        await self._search.ask(DropFile(tenant=caller.tenant, file=name), bool)
        return Deleted(name, "file")
