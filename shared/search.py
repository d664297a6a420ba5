"""The wire between gateways and the search process: one request of a tagged union, one answer.

MessagePack over HTTP. The gateway has checked what a client sent; the search process trusts it,
but for what only it knows: who owns what, how much a key keeps, whether vectors fit a store.
"""

from typing import Literal

import msgspec

#: What attributes may be. Booleans are no numbers: `true` equals no `1`.
Value = str | bool | float
Attributes = dict[str, Value]

#: How ids begin, as OpenAI's do.
STORE_ID, FILE_ID, FILE_BATCH_ID = "vs_", "file-", "vsfb_"


class _Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all that is sent."""


class Filter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's two filters in one type: a comparison of an attribute, or `and`, `or` of others."""

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "and", "or"]
    key: str = ""
    value: Value | list[Value] | None = None
    filters: tuple["Filter", ...] = ()


class Item(_Wire, frozen=True, kw_only=True):
    """What a store holds. `vector`: little-endian float32 of length 1; empty where not asked for."""

    id: str
    vector: bytes = b""
    text: str = ""
    image: str = ""  #: a URL, or the SHA-256 of an image that is not kept
    file_id: str = ""
    filename: str = ""
    attributes: Attributes = {}


class Hit(_Wire, frozen=True, kw_only=True):
    """An item that a search found. `score`: the cosine."""

    item: Item
    score: float


class StoreRecord(_Wire, frozen=True, kw_only=True):
    """A store. Its model, digest and dimensions stay what they were when it was made."""

    id: str
    name: str
    created_at: int
    last_active_at: int
    model: str
    digest: str
    dimensions: int
    prompt: str = ""  #: that stands before what is stored
    query_prompt: str = ""  #: that stands before what is searched
    metadata: dict[str, str] = {}
    num_items: int = 0
    num_bytes: int = 0
    num_files: int = 0
    is_read_only: bool = False
    expires_after_days: int = 0  #: without use, before it is deleted; 0: never

    @property
    def expires_at(self) -> int | None:
        days = self.expires_after_days
        return self.last_active_at + 86_400 * days if days else None


class FileRecord(_Wire, frozen=True, kw_only=True):
    """A file that was uploaded."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    data: bytes = b""


class StoreFile(_Wire, frozen=True, kw_only=True):
    """A file in a store."""

    id: str
    store_id: str
    filename: str
    created_at: int
    status: Literal["in_progress", "completed", "failed"]
    num_chunks: int
    num_bytes: int
    max_chunk_tokens: int
    chunk_overlap_tokens: int
    attributes: Attributes = {}
    #: Of one that failed: why it could not be attached.
    error_code: str = ""
    error: str = ""


class FileBatch(_Wire, frozen=True, kw_only=True):
    """Files that were attached by one request; those that failed are in no store."""

    id: str
    store_id: str
    created_at: int
    files: list[StoreFile]


class Page(_Wire, frozen=True, kw_only=True):
    """Which part of a list: `limit` entries after one id, or before one."""

    limit: int = 20
    after: str = ""
    before: str = ""
    is_ascending: bool = False


class Request(_Wire, frozen=True, tag=True):
    """Base of the requests. `tenant` names the key that asks."""

    tenant: str = ""


class CreateStore(Request, frozen=True, kw_only=True):
    """-> StoreRecord"""

    name: str
    model: str
    digest: str
    dimensions: int
    prompt: str = ""
    query_prompt: str = ""
    metadata: dict[str, str] = {}
    expires_after_days: int = 0


class ReadStore(Request, frozen=True, kw_only=True):
    """-> StoreRecord. `store`: an id; or, for an operator's default, a name."""

    store: str


class ListStores(Request, frozen=True, kw_only=True):
    """-> list[StoreRecord]; one more than the limit where there are more."""

    page: Page


class ChangeStore(Request, frozen=True, kw_only=True):
    """-> StoreRecord. None: as it is."""

    store: str
    name: str | None = None
    metadata: dict[str, str] | None = None
    expires_after_days: int | None = None


class DropStore(Request, frozen=True, kw_only=True):
    """-> True"""

    store: str


class PutItems(Request, frozen=True, kw_only=True):
    """Insert items, or replace those of the same id, all or none. -> StoreRecord, when durable."""

    store: str
    digest: str  #: of the model that made the vectors; empty: the client made them itself
    items: list[Item]


class DropItems(Request, frozen=True, kw_only=True):
    """Delete by ids or by filter. -> int: how many."""

    store: str
    ids: list[str] | None = None
    where: Filter | None = None


class ReadItems(Request, frozen=True, kw_only=True):
    """-> list[Item] by ids; or, without ids, a page in the order of ids, one more than its limit."""

    store: str
    ids: list[str] | None = None
    page: Page = Page()
    with_vectors: bool = False


class Query(Request, frozen=True, kw_only=True):
    """-> list[Hit], best first: for each item its best score of all vectors."""

    store: str
    digest: str
    vectors: list[bytes]
    k: int
    where: Filter | None = None


class PutFile(Request, frozen=True, kw_only=True):
    """-> FileRecord"""

    filename: str
    purpose: str
    data: bytes


class ReadFile(Request, frozen=True, kw_only=True):
    """-> FileRecord"""

    file: str
    with_data: bool = False


class ListFiles(Request, frozen=True, kw_only=True):
    """-> list[FileRecord]; one more than the limit where there are more."""

    page: Page
    purpose: str = ""


class DropFile(Request, frozen=True, kw_only=True):
    """-> True. Its chunks stay in their stores."""

    file: str


class AttachFile(Request, frozen=True, kw_only=True):
    """Put a file's chunks into a store, in place of those that it had. -> StoreFile, when durable."""

    store: str
    file: str
    digest: str
    items: list[Item]
    max_chunk_tokens: int
    chunk_overlap_tokens: int
    attributes: Attributes = {}


class ReadStoreFile(Request, frozen=True, kw_only=True):
    """-> StoreFile"""

    store: str
    file: str


class ListStoreFiles(Request, frozen=True, kw_only=True):
    """-> list[StoreFile]; one more than the limit where there are more."""

    store: str
    page: Page


class ChangeStoreFile(Request, frozen=True, kw_only=True):
    """Give the chunks of a file other attributes. -> StoreFile, when durable"""

    store: str
    file: str
    attributes: Attributes


class PutFileBatch(Request, frozen=True, kw_only=True):
    """Note which files a request has attached, or could not. -> FileBatch"""

    store: str
    files: list[StoreFile]


class ReadFileBatch(Request, frozen=True, kw_only=True):
    """-> FileBatch, without files that have left the store since"""

    store: str
    batch: str


class DetachFile(Request, frozen=True, kw_only=True):
    """Take a file's chunks out of a store. -> True"""

    store: str
    file: str


AnyRequest = (
    CreateStore | ReadStore | ListStores | ChangeStore | DropStore
    | PutItems | DropItems | ReadItems | Query
    | PutFile | ReadFile | ListFiles | DropFile
    | AttachFile | ReadStoreFile | ListStoreFiles | ChangeStoreFile | DetachFile
    | PutFileBatch | ReadFileBatch
)  # fmt: skip


class Fault(_Wire, frozen=True, kw_only=True):
    """Why a request was refused; the message is fit for the client's eyes."""

    code: Literal[
        "not_found", "conflict", "read_only", "full", "too_large", "unavailable", "invalid"
    ]
    message: str
    param: str = ""


class SearchError(Exception):
    """A request that the search process refuses."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def refuse(code: str, message: str, param: str = "") -> SearchError:
    """The error of a fault."""
    return SearchError(msgspec.convert({"code": code, "message": message, "param": param}, Fault))
