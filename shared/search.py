"""The protocol between gateways and the search process: a request of a tagged union, and its answer.

MessagePack over HTTP. The gateway validates requests; the search process checks ownership, quotas and the
dimensions of vectors.
"""

from typing import Generic, Literal, TypeVar

import msgspec

#: The value of an attribute. Booleans are not numbers: `true` does not equal `1`.
Value = str | bool | float
Attributes = dict[str, Value]
Answer = TypeVar("Answer")

#: Prefixes of ids, as in OpenAI's API.
STORE_ID, FILE_ID, FILE_BATCH_ID = "vs_", "file-", "vsfb_"
MODEL_CHANGED = (
    "The served model of this name is not the model that embedded the items of this store: create "
    "a new store."
)


class _Wire(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of requests and answers."""


class Filter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A comparison of an attribute, or `and` and `or` of filters, as OpenAI defines them."""

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin", "and", "or"]
    key: str = ""
    value: Value | list[Value] | None = None
    filters: tuple["Filter", ...] = ()


class Item(_Wire, frozen=True, kw_only=True):
    """An item of a store. `vector`: little-endian float32 of length 1; empty unless requested."""

    id: str
    vector: bytes = b""
    text: str = ""
    image: str = ""  #: a URL, or the SHA-256 of an image, whose bytes are not stored
    file_id: str = ""
    filename: str = ""
    attributes: Attributes = {}


class Hit(_Wire, frozen=True, kw_only=True):
    """A search result. `score`: the cosine similarity."""

    item: Item
    score: float


class StoreRecord(_Wire, frozen=True, kw_only=True):
    """A vector store. Its model, digest and dimensions never change."""

    id: str
    name: str
    created_at: int
    last_active_at: int
    model: str
    digest: str
    dimensions: int
    prompt: str = ""  #: prepended to stored texts
    query_prompt: str = ""  #: prepended to queries
    uses_model_prompt: bool = False  #: True: the model's own prompt is prepended instead
    metadata: dict[str, str] = {}
    num_items: int = 0
    num_bytes: int = 0
    num_files: int = 0
    is_read_only: bool = False
    expires_after_days: int = 0  #: days without use; 0: never

    @property
    def expires_at(self) -> int | None:
        days = self.expires_after_days
        return self.last_active_at + 86_400 * days if days else None


class FileRecord(_Wire, frozen=True, kw_only=True):
    """An uploaded file."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    data: bytes = b""


class StoreFile(_Wire, frozen=True, kw_only=True):
    """A file attached to a store."""

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
    error_code: str = ""
    error: str = ""


class FileBatch(_Wire, frozen=True, kw_only=True):
    """Files attached by one request. Failed files are not in the store."""

    id: str
    store_id: str
    created_at: int
    files: list[StoreFile]


class Page(_Wire, frozen=True, kw_only=True):
    """A page of a list: `limit` entries after or before an id."""

    limit: int = 20
    after: str = ""
    before: str = ""
    is_ascending: bool = False


class Request(_Wire, Generic[Answer], frozen=True, kw_only=True, tag=True):
    """Base of the requests, with the type of their answer. `tenant`: hash of the API key."""

    tenant: str = ""


class Read(Request[Answer], frozen=True):
    """Base of the requests that only read. They do not wait for writers."""


class CreateStore(Request[StoreRecord], frozen=True, kw_only=True):
    name: str
    model: str
    digest: str
    dimensions: int
    prompt: str = ""
    query_prompt: str = ""
    metadata: dict[str, str] = {}
    expires_after_days: int = 0


class ReadStore(Read[StoreRecord], frozen=True, kw_only=True):
    store: str  #: an id, or a name


class ListStores(Read[list[StoreRecord]], frozen=True, kw_only=True):
    """As for all list requests, the answer has limit + 1 entries if there are more entries than the limit."""

    page: Page


class ChangeStore(Request[StoreRecord], frozen=True, kw_only=True):
    """Change a store. Fields that are None are left unchanged."""

    store: str
    name: str | None = None
    metadata: dict[str, str] | None = None
    expires_after_days: int | None = None


class DropStore(Request[bool], frozen=True, kw_only=True):
    store: str


class PutItems(Request[StoreRecord], frozen=True, kw_only=True):
    """Upsert items by id, all or none. The items are durable when the request is answered."""

    store: str
    digest: str  #: of the embedding model; empty: the client computed the vectors
    items: list[Item]


class DropItems(Request[int], frozen=True, kw_only=True):
    """Delete by ids or by filter. The answer is the number of deleted items."""

    store: str
    ids: list[str] | None = None
    where: Filter | None = None


class ReadItems(Read[list[Item]], frozen=True, kw_only=True):
    """Items by ids; without ids, a page in the order of ids."""

    store: str
    ids: list[str] | None = None
    page: Page = Page()
    with_vectors: bool = False


class Query(Read[list[Hit]], frozen=True, kw_only=True):
    """Search a store; the best hits come first. The score of an item is its best score over all vectors."""

    store: str
    digest: str
    vectors: list[bytes]
    k: int
    where: Filter | None = None


class PutFile(Request[FileRecord], frozen=True, kw_only=True):
    filename: str
    purpose: str
    data: bytes


class ReadFile(Read[FileRecord], frozen=True, kw_only=True):
    file: str
    with_data: bool = False


class ListFiles(Read[list[FileRecord]], frozen=True, kw_only=True):
    page: Page
    purpose: str = ""


class DropFile(Request[bool], frozen=True, kw_only=True):
    """The file's chunks remain in their stores."""

    file: str


class AttachFile(Request[StoreFile], frozen=True, kw_only=True):
    """Replace a file's chunks in a store. The chunks are durable when the request is answered."""

    store: str
    file: str
    digest: str
    items: list[Item]
    max_chunk_tokens: int
    chunk_overlap_tokens: int
    attributes: Attributes = {}


class ReadStoreFile(Read[StoreFile], frozen=True, kw_only=True):
    store: str
    file: str


class ListStoreFiles(Read[list[StoreFile]], frozen=True, kw_only=True):
    store: str
    page: Page


class ChangeStoreFile(Request[StoreFile], frozen=True, kw_only=True):
    """Replace the attributes of a file's chunks. The change is durable when the request is answered."""

    store: str
    file: str
    attributes: Attributes


class PutFileBatch(Request[FileBatch], frozen=True, kw_only=True):
    """Record the files of a batch request."""

    store: str
    files: list[StoreFile]


class ReadFileBatch(Read[FileBatch], frozen=True, kw_only=True):
    """The answer omits files that were detached since."""

    store: str
    batch: str


class DetachFile(Request[bool], frozen=True, kw_only=True):
    """Remove a file's chunks from a store."""

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
    """The reason why a request was refused. The message is shown to the client."""

    code: Literal[
        "not_found", "conflict", "read_only", "full", "too_large", "unavailable", "invalid"
    ]
    message: str
    param: str = ""


class SearchError(Exception):
    """The search process refuses the request."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


def refuse(code: str, message: str, param: str = "") -> SearchError:
    return SearchError(msgspec.convert({"code": code, "message": message, "param": param}, Fault))
