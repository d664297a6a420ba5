"""Requests and responses of vector stores: their types, checks of requests, and chunks of files."""

import base64
import binascii
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.api.fields import (
    Listing,
    ModelName,
    RequestStruct,
    check_chars,
    check_most,
    check_num,
    invalid,
)
from gateway.calls.key_limits import CHARS_PER_TOKEN
from gateway.http.errors import InvalidRequest
from gateway.http.unknown_fields import unsupported
from gateway.media.loader import ImageSource
from shared.protocol import ModelCard
from shared.search import (
    FileBatch,
    FileRecord,
    Filter,
    Hit,
    Item,
    Page,
    StoreFile,
    StoreRecord,
)
from shared.settings.limits import (
    MAX_BATCH_STORE_FILES,
    MAX_FILTER_VALUES,
    MAX_IMAGE_URL_CHARS,
    MAX_ITEM_ID_CHARS,
    MAX_METADATA_ENTRIES,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    MAX_PAGE,
    MAX_SEARCH_RESULTS,
    MAX_STORE_NAME_CHARS,
    LimitSettings,
)

Key = Annotated[str, Meta(min_length=1, max_length=MAX_METADATA_KEY_CHARS)]
Text = Annotated[str, Meta(max_length=MAX_METADATA_VALUE_CHARS)]
Metadata = Annotated[dict[Key, Text], Meta(max_length=MAX_METADATA_ENTRIES)]
ItemAttributes = Annotated[dict[Key, Text | bool | float], Meta(max_length=MAX_METADATA_ENTRIES)]
StoreName = Annotated[str, Meta(max_length=MAX_STORE_NAME_CHARS)]
FileIds = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=MAX_ITEM_ID_CHARS)]],
    Meta(max_length=MAX_BATCH_STORE_FILES),
]
ItemId = Annotated[str, Meta(min_length=1, max_length=MAX_ITEM_ID_CHARS)]
Vector = list[float] | str


# Requests
#: OpenAI's defaults, in tokens.
CHUNK_TOKENS, OVERLAP_TOKENS = 800, 400
#: Maximum size of a chunk relative to the model's context, as token counts are estimates.
_CHUNK_SHARE = 0.75
#: Preferred ends of a chunk, the best first, in its last quarter.
_ENDS = ("\n\n", "\n", ". ", " ")


class ExpiresAfter(RequestStruct, frozen=True, kw_only=True):
    """When an unused store is deleted."""

    anchor: Literal["last_active_at"]
    days: Annotated[int, Meta(ge=1, le=365)]


class StaticChunks(RequestStruct, frozen=True, kw_only=True):
    """Sizes in tokens, of four characters each."""

    max_chunk_size_tokens: Annotated[int, Meta(ge=100, le=4096)]
    chunk_overlap_tokens: Annotated[int, Meta(ge=0)]


class ChunkingStrategy(RequestStruct, frozen=True, kw_only=True):
    """`auto`, or `static` with its sizes."""

    type: Literal["auto", "static"]
    static: StaticChunks | None = None


class CreateStoreRequest(RequestStruct, frozen=True, kw_only=True):
    name: StoreName | None = None
    metadata: Metadata | None = None
    expires_after: ExpiresAfter | None = None
    file_ids: FileIds | None = None
    chunking_strategy: ChunkingStrategy | None = None  #: for `file_ids`
    #: extension: the embedding model; required unless exactly one is served
    embedding_model: ModelName | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None  #: extension: as in an embedding request
    prompt: str | None = None  #: extension: the model's prompt before stored texts
    query_prompt: str | None = None  #: extension: the model's prompt before queries


class ChangeStoreRequest(RequestStruct, frozen=True, kw_only=True):
    name: StoreName | None = None
    metadata: Metadata | None = None
    expires_after: ExpiresAfter | UnsetType | None = UNSET  #: null: the store does not expire


class QueryInput(RequestStruct, frozen=True, kw_only=True):
    """A query that is not plain text. `embedding`: numbers, or little-endian float32 in base64."""

    text: str | None = None
    image: str | None = None
    embedding: Vector | None = None


class ItemInput(QueryInput, frozen=True, kw_only=True):
    """An item: its content, or its vector."""

    id: ItemId
    attributes: ItemAttributes | None = None


class PutItemsRequest(RequestStruct, frozen=True, kw_only=True):
    items: Annotated[list[ItemInput], Meta(min_length=1)]


class DeleteItemsRequest(RequestStruct, frozen=True, kw_only=True):
    """The body of `DELETE /v1/vector_stores/{id}/items`: ids, or a filter."""

    ids: Annotated[list[ItemId], Meta(min_length=1)] | None = None
    filters: Filter | None = None


class RankingOptions(RequestStruct, frozen=True, kw_only=True):
    """`ranker`: `none`, or the name of a reranking model."""

    score_threshold: Annotated[float, Meta(ge=-1, le=1)] | None = None
    ranker: ModelName | None = None


class SearchRequest(RequestStruct, frozen=True, kw_only=True):
    query: str | Annotated[list[str], Meta(min_length=1)] | QueryInput
    max_num_results: Annotated[int, Meta(ge=1, le=MAX_SEARCH_RESULTS)] | None = None
    filters: Filter | None = None
    ranking_options: RankingOptions | None = None
    rewrite_query: bool | None = None


class SimilarRequest(RequestStruct, frozen=True, kw_only=True):
    text: str | None = None
    keywords: str | list[str] | None = None
    num_results: Annotated[int, Meta(ge=1, le=MAX_SEARCH_RESULTS)] = 10


class SimilarAnswer(msgspec.Struct):
    """One line per item, nearest first."""

    text: list[str]


class AttachFileRequest(RequestStruct, frozen=True, kw_only=True):
    file_id: ItemId
    attributes: ItemAttributes | None = None
    chunking_strategy: ChunkingStrategy | None = None


class ChangeFileRequest(RequestStruct, frozen=True, kw_only=True):
    """The body of `POST /v1/vector_stores/{id}/files/{file_id}`. null: no attributes."""

    attributes: ItemAttributes | None


class FileBatchRequest(RequestStruct, frozen=True, kw_only=True):
    """The body of `POST /v1/vector_stores/{id}/file_batches`: ids, or files with options of their own."""

    file_ids: FileIds | None = None
    files: (
        Annotated[list[AttachFileRequest], Meta(min_length=1, max_length=MAX_BATCH_STORE_FILES)]
        | None
    ) = None
    attributes: ItemAttributes | None = None
    chunking_strategy: ChunkingStrategy | None = None


class PageQuery(RequestStruct, frozen=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 20
    after: Annotated[str, Meta(max_length=MAX_ITEM_ID_CHARS)] = ""


class ListQuery(PageQuery, frozen=True, kw_only=True):
    order: Literal["asc", "desc"] = "desc"
    before: Annotated[str, Meta(max_length=MAX_ITEM_ID_CHARS)] = ""

    @property
    def page(self) -> Page:
        """The page in the search process's format."""
        return Page(
            limit=self.limit,
            after=self.after,
            before=self.before,
            is_ascending=self.order == "asc",
        )

    def cut(self, entries: list[Any]) -> tuple[list[Any], bool]:
        """The page, and whether there are more. `entries` may have one more than the limit."""
        kept = entries[-self.limit :] if self.before else entries[: self.limit]
        return kept, len(entries) > self.limit


class FilesQuery(ListQuery, frozen=True, kw_only=True):
    """Page of a list of files, optionally of one status."""

    filter: Literal["", "in_progress", "completed", "failed", "cancelled"] = ""

    def choose(self, files: Sequence[StoreFile]) -> tuple[list[StoreFile], bool]:
        """The page of these files, in the order of attachment, and whether there are more."""
        chosen = [file for file in files if self.filter in ("", file.status)]
        if self.order == "desc":
            chosen.reverse()
        ids = [file.id for file in chosen]
        if self.after in ids:
            chosen = chosen[ids.index(self.after) + 1 :]
        if self.before in ids:
            before = chosen[: [file.id for file in chosen].index(self.before)]
            return before[-self.limit :], len(before) > self.limit
        return chosen[: self.limit], len(chosen) > self.limit


class ItemsQuery(PageQuery, frozen=True, kw_only=True):
    """Page of the items, by id. `include`: `embedding`."""

    include: Literal["", "embedding"] = ""


class ItemQuery(RequestStruct, frozen=True, kw_only=True):
    """`include`: `embedding`."""

    include: Literal["", "embedding"] = ""


# Responses


class FileCounts(msgspec.Struct):
    """Numbers of files by status. Files are never in progress."""

    completed: int
    total: int
    in_progress: int = 0
    failed: int = 0
    cancelled: int = 0


class VectorStore(msgspec.Struct):
    """OpenAI's object, with extensions from `embedding_model` on."""

    id: str
    created_at: int
    name: str
    usage_bytes: int
    file_counts: FileCounts
    last_active_at: int
    metadata: dict[str, str]
    embedding_model: str
    embedding_digest: str
    dimensions: int
    num_items: int
    is_read_only: bool
    object: str = "vector_store"
    status: str = "completed"
    expires_after: dict[str, Any] | None = None
    expires_at: int | None = None

    @classmethod
    def of(cls, record: StoreRecord) -> "VectorStore":
        return cls(
            id=record.id,
            created_at=record.created_at,
            name=record.name,
            usage_bytes=record.num_bytes,
            file_counts=FileCounts(record.num_files, record.num_files),
            last_active_at=record.last_active_at,
            metadata=record.metadata,
            embedding_model=record.model,
            embedding_digest=record.digest,
            dimensions=record.dimensions,
            num_items=record.num_items,
            is_read_only=record.is_read_only,
            expires_after={"anchor": "last_active_at", "days": record.expires_after_days}
            if record.expires_after_days
            else None,
            expires_at=record.expires_at,
        )


class StoreList(Listing[VectorStore]):
    pass


class Deleted(msgspec.Struct):
    id: str
    object: str
    deleted: bool = True


class ItemsDeleted(msgspec.Struct):
    num_deleted: int
    object: str = "vector_store.items.deleted"


class ItemsStored(msgspec.Struct):
    """The store after items were written to disk."""

    num_items: int
    store: VectorStore
    object: str = "vector_store.items"


class Content(msgspec.Struct, omit_defaults=True):
    """A piece of an item: a text, or an image's URL or SHA-256."""

    type: str
    text: str = ""
    image_url: dict[str, str] = {}


class StoredItem(msgspec.Struct):
    """An item. `embedding`: if requested, little-endian float32 in base64, normalized."""

    id: str
    content: list[Content]
    attributes: dict[str, str | bool | float]
    embedding: str | UnsetType = UNSET
    object: str = "vector_store.item"


class ItemList(Listing[StoredItem]):
    pass


class SearchHit(msgspec.Struct):
    """A chunk of a file, or an item, whose id is also `file_id` and `filename`."""

    id: str
    file_id: str
    filename: str
    score: float
    attributes: dict[str, str | bool | float]
    content: list[Content]


class SearchPage(msgspec.Struct):
    """All hits, as one page."""

    search_query: list[str]
    data: list[SearchHit]
    has_more: bool = False
    next_page: None = None
    object: str = "vector_store.search_results.page"


class StoreFileObject(msgspec.Struct):
    id: str
    created_at: int
    vector_store_id: str
    usage_bytes: int
    status: str
    chunking_strategy: dict[str, Any]
    attributes: dict[str, str | bool | float]
    last_error: dict[str, str] | None = None
    object: str = "vector_store.file"

    @classmethod
    def of(cls, record: StoreFile) -> "StoreFileObject":
        sizes = {
            "max_chunk_size_tokens": record.max_chunk_tokens,
            "chunk_overlap_tokens": record.chunk_overlap_tokens,
        }
        return cls(
            id=record.id,
            created_at=record.created_at,
            vector_store_id=record.store_id,
            usage_bytes=record.num_bytes,
            status=record.status,
            chunking_strategy={"type": "static", "static": sizes},
            attributes=record.attributes,
            last_error={"code": record.error_code, "message": record.error}
            if record.error_code
            else None,
        )


class FileBatchObject(msgspec.Struct):
    """Files that one request has attached."""

    id: str
    created_at: int
    vector_store_id: str
    file_counts: FileCounts
    status: str = "completed"
    object: str = "vector_store.file_batch"

    @classmethod
    def of(cls, batch: FileBatch) -> "FileBatchObject":
        num_failed = sum(file.status == "failed" for file in batch.files)
        total = len(batch.files)
        counts = FileCounts(total - num_failed, total, failed=num_failed)
        return cls(batch.id, batch.created_at, batch.store_id, counts)


class StoreFileList(Listing[StoreFileObject]):
    pass


class FileContent(msgspec.Struct):
    """The chunks of a file in a store."""

    data: list[Content]
    has_more: bool = False
    next_page: None = None
    object: str = "vector_store.file_content.page"


def _content(item: Item) -> list[Content]:
    pieces = []
    if item.text:
        pieces.append(Content("text", item.text))
    if item.image:
        pieces.append(Content("image_url", image_url={"url": item.image}))
    return pieces


def to_stored(item: Item) -> StoredItem:
    """An item in the format of a response."""
    vector = base64.b64encode(item.vector).decode() if item.vector else UNSET
    return StoredItem(item.id, _content(item), item.attributes, vector)


def to_hit(hit: Hit) -> SearchHit:
    """A hit in the format of a response."""
    item = hit.item
    return SearchHit(
        id=item.id,
        file_id=item.file_id or item.id,
        filename=item.filename or item.id,
        score=hit.score,
        attributes=item.attributes,
        content=_content(item),
    )


def check_text(param: str, value: str) -> str:
    """Raises: InvalidRequest for control characters, which are unsafe in logs and files."""
    if any(ord(character) < 32 or 0xD800 <= ord(character) < 0xE000 for character in value):
        raise invalid(param, "send it without control characters")
    return value


def find_prompt(param: str, asked: str | None, card: ModelCard, usual: Sequence[str]) -> str:
    """The requested prompt, or the model's default for this use. Raises: InvalidRequest."""
    if asked is None:
        return next((name for name in usual if name in card.prompts), "")
    if asked and asked not in card.prompts:
        offered = ", ".join(card.prompts) or "none"
        raise invalid(param, f"the prompts of this model are: {offered}")
    return asked


def pack_vector(vector: Vector, param: str) -> bytes:
    """Little-endian float32. Raises: InvalidRequest."""
    if isinstance(vector, str):
        try:
            data = base64.b64decode(vector, validate=True)
        except (binascii.Error, ValueError):
            data = b"?"
        if not data or len(data) % 4:
            raise invalid(param, "send numbers, or float32 in base64")
        return data
    if not vector:
        raise invalid(param, "send at least one number")
    return array("f", vector).tobytes()


def to_image(url: str, param: str) -> ImageSource:
    """An image by URL, or in bare base64."""
    if not url[:8].lower().startswith(("data:", "http://", "https://")):
        url = f"data:;base64,{url}"
    return ImageSource(url, param)


def name_of_image(url: str | None, param: str) -> str:
    """The stored name of an image: its URL, or `inline`. Raises: InvalidRequest."""
    if url is None:
        return ""
    if not url[:8].lower().startswith(("http://", "https://")):
        return "inline"
    if len(url) > MAX_IMAGE_URL_CHARS:
        raise invalid(param, f"send a URL of at most {MAX_IMAGE_URL_CHARS} characters")
    return url


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Refuse control characters. Raises: InvalidRequest."""
    for key, value in (metadata or {}).items():
        check_text("metadata", key + value)


def check_attributes(attributes: Mapping[str, Any] | None, param: str) -> None:
    """Refuse numbers that are not finite. Raises: InvalidRequest."""
    for key, value in (attributes or {}).items():
        check_text(param, key)
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(param, "send finite numbers")


def check_items(items: Sequence[ItemInput], limits: LimitSettings) -> None:
    """Raises: InvalidRequest."""
    check_num("items", len(items), limits.max_inputs, "items")
    places: dict[str, int] = {}
    for index, item in enumerate(items):
        place = f"items.[{index}]"
        check_text(f"{place}.id", item.id)
        if places.setdefault(item.id, index) != index:
            raise invalid(f"{place}.id", f"items.[{places[item.id]}] has this id too")
        if item.embedding is None and (item.text is None) == (item.image is None):
            raise invalid(place, "send either text or image, or an embedding")
        if item.embedding is None and item.text == "":
            raise invalid(f"{place}.text", "send text that is not empty")
        if len(item.text or "") > limits.max_item_chars:
            raise InvalidRequest(
                f"The text is too long: send at most {limits.max_item_chars} characters, "
                "or a file, which is cut into chunks.",
                param=f"{place}.text",
                code="text_too_long",
            )
        check_attributes(item.attributes, f"{place}.attributes")
    check_chars(sum(len(item.text or "") for item in items), limits.max_input_chars, "items")


def check_search(request: SearchRequest, limits: LimitSettings) -> None:
    """Raises: InvalidRequest."""
    if request.rewrite_query:
        raise unsupported("rewrite_query")
    if request.filters is not None:
        check_filter(request.filters, limits)
    num = len(request.query) if isinstance(request.query, list) else 1
    check_num("queries", num, limits.max_search_queries, "query")


def check_filter(where: Filter, limits: LimitSettings) -> None:
    """Raises: InvalidRequest that names the part."""
    num_left = limits.max_filters

    def check(part: Filter, param: str, depth: int) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise invalid("filters", f"send at most {limits.max_filters} filters")
        if depth > limits.max_filter_depth:
            raise invalid("filters", f"nest at most {limits.max_filter_depth} filters")
        if part.type in ("and", "or"):
            if part.key or part.value is not None or not part.filters:
                raise invalid(param, f"send {part.type} only with filters, at least one")
            for index, inner in enumerate(part.filters):
                check(inner, f"{param}.filters.[{index}]", depth + 1)
        else:
            _check_comparison(part, param)

    check(where, "filters", 1)


def _check_comparison(part: Filter, param: str) -> None:
    if part.filters or not 0 < len(part.key) <= MAX_METADATA_KEY_CHARS:
        raise invalid(f"{param}.key", f"send a key of 1 to {MAX_METADATA_KEY_CHARS} characters")
    values = part.value if isinstance(part.value, list) else [part.value]
    if isinstance(part.value, list) != (part.type in ("in", "nin")) or part.value is None:
        raise invalid(f"{param}.value", "send a list with in and nin, one value with the others")
    check_most(f"{param}.value", len(values), MAX_FILTER_VALUES, "values")
    for value in values:
        if isinstance(value, str) and len(value) > MAX_METADATA_VALUE_CHARS:
            raise invalid(
                f"{param}.value", f"send texts of at most {MAX_METADATA_VALUE_CHARS} characters"
            )
        is_number = isinstance(value, float) and not isinstance(value, bool)
        if is_number and not math.isfinite(value):  # type: ignore[arg-type]
            raise invalid(f"{param}.value", "send a finite number")
        if part.type in ("gt", "gte", "lt", "lte") and not is_number:
            raise invalid(f"{param}.value", f"{part.type} compares numbers: send a number")


def read_query(
    query: str | Sequence[str] | QueryInput,
) -> tuple[list[str], list[str | ImageSource], list[bytes]]:
    """The query as texts, inputs to embed, and vectors. Raises: InvalidRequest."""
    if isinstance(query, QueryInput):
        if sum(x is not None for x in (query.text, query.image, query.embedding)) != 1:
            raise invalid("query", "send one of text, image and embedding")
        if query.image is not None:
            return [], [to_image(query.image, "query.image")], []
        if query.embedding is not None:
            return [], [], [pack_vector(query.embedding, "query.embedding")]
        query = query.text or ""
    texts = [query] if isinstance(query, str) else list(query)
    if not all(texts):
        raise invalid("query", "send text that is not empty")
    return texts, list(texts), []


def chunk_sizes(strategy: ChunkingStrategy | None, card: ModelCard) -> tuple[int, int]:
    """Tokens of a chunk, and of its overlap with the previous one. Raises: InvalidRequest."""
    if strategy is None or strategy.type == "auto":
        size = min(CHUNK_TOKENS, max(1, int(card.max_model_len * _CHUNK_SHARE)))
        return size, min(OVERLAP_TOKENS, size // 2)
    if strategy.static is None:
        raise invalid("chunking_strategy.static", "send the sizes of static chunks")
    size, overlap = strategy.static.max_chunk_size_tokens, strategy.static.chunk_overlap_tokens
    if overlap > size // 2:
        param = "chunking_strategy.static.chunk_overlap_tokens"
        raise invalid(param, f"send at most half of the chunk's size: {size // 2}")
    return size, overlap


def decode_text(file: FileRecord) -> str:
    """Raises: InvalidRequest."""
    try:
        text = file.data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InvalidRequest(
            "The file is not UTF-8 text: convert it before you upload it.",
            param="file_id",
            code="unsupported_file",
        )
    if not text.strip():
        raise invalid("file_id", "the file is empty")
    return text


def cut_chunks(text: str, num_tokens: int, overlap: int) -> list[str]:
    """Chunks of at most `num_tokens` tokens, estimated as four characters each.

    A chunk ends after a paragraph, line, sentence or word, if one ends in its last quarter.
    """
    most, shared = num_tokens * CHARS_PER_TOKEN, overlap * CHARS_PER_TOKEN
    chunks, begin = [], 0
    while begin < len(text):
        end = min(begin + most, len(text))
        if end < len(text):
            end = _find_end(text, begin + most - most // 4, end)
        if chunk := text[begin:end].strip():
            chunks.append(chunk)
        begin = end if end == len(text) else max(begin + 1, end - shared)
    return chunks


def _find_end(text: str, first: int, last: int) -> int:
    for mark in _ENDS:
        found = text.rfind(mark, first, last)
        if found >= 0:
            return found + len(mark)
    return last
