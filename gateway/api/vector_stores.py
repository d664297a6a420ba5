"""`/v1/vector_stores`: vector stores, their items and files, and search.

This is OpenAI's API with an extension, `items`: vectors, texts and images with ids that the client chooses. The
embedding model of a store cannot be changed.

Source: OpenAI API reference, "Vector stores", "Vector store files".
"""

import base64
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

import shared.search as wire
from gateway.api.fields import (
    UNSUPPORTED,
    Count,
    Listing,
    ModelName,
    Positive,
    RequestStruct,
    check_chars,
    check_most,
    check_num,
    copy_fields,
    invalid,
    no_such,
)
from gateway.api.pooling import (
    DOCUMENT_PROMPTS,
    QUERY_PROMPTS,
    Embeddings,
    Reranking,
    check_dimensions,
    check_prompt,
    rows_of,
    scores_of,
    split_documents,
    split_inputs,
    to_image,
)
from gateway.calls.key_limits import CHARS_PER_TOKEN
from gateway.calls.lifecycle import Lifecycle
from gateway.calls.surface import NoOptions, Plan
from gateway.http.body import unsupported
from gateway.http.endpoint import Caller, Resource, operation
from gateway.http.errors import ApiError, InvalidRequest, NotFound, conflict
from gateway.media.loader import ImageSource
from gateway.search import SearchClient
from shared.protocol import Embed, ImagePart, ModelCard, Priority, Rerank, TextPart, Truncate
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
    MIB,
    LimitSettings,
)

Key = Annotated[str, Meta(min_length=1, max_length=MAX_METADATA_KEY_CHARS)]
Text = Annotated[str, Meta(max_length=MAX_METADATA_VALUE_CHARS)]
Metadata = Annotated[dict[Key, Text], Meta(max_length=MAX_METADATA_ENTRIES)]
ItemAttributes = Annotated[dict[Key, Text | bool | float], Meta(max_length=MAX_METADATA_ENTRIES)]
StoreName = Annotated[str, Meta(max_length=MAX_STORE_NAME_CHARS)]
ItemId = Annotated[str, Meta(min_length=1, max_length=MAX_ITEM_ID_CHARS)]
FileIds = Annotated[list[ItemId], Meta(max_length=MAX_BATCH_STORE_FILES)]
Vector = list[float] | str
T = TypeVar("T")

#: OpenAI's defaults, in tokens.
CHUNK_TOKENS, OVERLAP_TOKENS = 800, 400
#: Default chunks are at most this share of the model's context, because token counts are estimates.
_CHUNK_SHARE = 0.75
#: Preferred ends of a chunk in its last quarter, best first.
_ENDS = ("\n\n", "\n", ". ", " ")

# Requests


class ExpiresAfter(RequestStruct, frozen=True, kw_only=True):
    """Time after which an unused store is deleted."""

    anchor: Literal["last_active_at"]
    days: Annotated[int, Meta(ge=1, le=365)]


class StaticChunks(RequestStruct, frozen=True, kw_only=True):
    """Sizes of chunks in tokens. A token is estimated as four characters."""

    max_chunk_size_tokens: Annotated[int, Meta(ge=100, le=4096)]
    chunk_overlap_tokens: Count

    def __post_init__(self) -> None:
        """Raises: ValueError."""
        if self.chunk_overlap_tokens > self.max_chunk_size_tokens // 2:
            raise ValueError("send chunk_overlap_tokens of at most half of max_chunk_size_tokens")


class ChunkingStrategy(RequestStruct, frozen=True, kw_only=True):
    type: Literal["auto", "static"]
    static: StaticChunks | None = None

    def __post_init__(self) -> None:
        """Raises: ValueError."""
        if self.type == "static" and self.static is None:
            raise ValueError("send static with the sizes of chunks")


class CreateStoreRequest(RequestStruct, frozen=True, kw_only=True):
    name: StoreName | None = None
    metadata: Metadata | None = None
    expires_after: ExpiresAfter | None = None
    file_ids: FileIds | None = None
    chunking_strategy: ChunkingStrategy | None = None  #: for `file_ids`
    #: extension: the embedding model; required unless exactly one is served
    embedding_model: ModelName | None = None
    dimensions: Positive | None = None  #: extension: as in an embedding request
    prompt: str | None = None  #: extension: name of the prompt to put before stored texts
    query_prompt: str | None = None  #: extension: name of the prompt to put before queries


class ChangeStoreRequest(RequestStruct, frozen=True, kw_only=True):
    name: StoreName | None = None
    metadata: Metadata | None = None
    expires_after: ExpiresAfter | UnsetType | None = UNSET  #: null: the store does not expire


class QueryInput(RequestStruct, frozen=True, kw_only=True):
    """A query as an object. `embedding`: a list of numbers, or little-endian float32 in base64."""

    text: str | None = None
    image: str | None = None
    embedding: Vector | None = None


class ItemInput(QueryInput, frozen=True, kw_only=True):
    id: ItemId
    attributes: ItemAttributes | None = None


class PutItemsRequest(RequestStruct, frozen=True, kw_only=True):
    items: Annotated[list[ItemInput], Meta(min_length=1)]


class DeleteItemsRequest(RequestStruct, frozen=True, kw_only=True):
    ids: Annotated[list[ItemId], Meta(min_length=1)] | None = None
    filters: wire.Filter | None = None


class RankingOptions(RequestStruct, frozen=True, kw_only=True):
    """`ranker`: `none`, or the name of a reranking model."""

    score_threshold: Annotated[float, Meta(ge=-1, le=1)] | None = None
    ranker: ModelName | None = None


class SearchRequest(RequestStruct, frozen=True, kw_only=True):
    query: str | Annotated[list[str], Meta(min_length=1)] | QueryInput
    max_num_results: Annotated[int, Meta(ge=1, le=MAX_SEARCH_RESULTS)] | None = None
    filters: wire.Filter | None = None
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
    """The body of `POST /v1/vector_stores/{id}/files/{file_id}`. null removes all attributes."""

    attributes: ItemAttributes | None


class FileBatchRequest(RequestStruct, frozen=True, kw_only=True):
    """The body of `POST /v1/vector_stores/{id}/file_batches`: file ids with common options, or files with their own."""

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
    def page(self) -> wire.Page:
        return wire.Page(
            limit=self.limit, after=self.after, before=self.before, is_ascending=self.order == "asc"
        )

    def cut(self, entries: list[Any]) -> tuple[list[Any], bool]:
        """The page, and whether more entries follow. `entries` has one more than the limit if more follow."""
        kept = entries[-self.limit :] if self.before else entries[: self.limit]
        return kept, len(entries) > self.limit

    def choose(self, entries: Sequence[Any]) -> tuple[list[Any], bool]:
        """The page of a complete, ascending list, and whether more entries follow. Unknown cursors are ignored."""
        chosen = [*entries] if self.order == "asc" else [*reversed(entries)]
        ids = [entry.id for entry in chosen]
        end = ids.index(self.before) if self.before in ids else len(ids)
        begin = ids.index(self.after) + 1 if self.after in ids else 0
        kept = chosen[begin:end]
        page = kept[-self.limit :] if self.before else kept[: self.limit]
        return page, len(kept) > self.limit


class FilesQuery(ListQuery, frozen=True, kw_only=True):
    filter: Literal["", "in_progress", "completed", "failed", "cancelled"] = ""


class ItemsQuery(PageQuery, frozen=True, kw_only=True):
    include: Literal["", "embedding"] = ""


class ItemQuery(RequestStruct, frozen=True, kw_only=True):
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
    """OpenAI's object, with extensions: `embedding_model` to `is_read_only`."""

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
    prompt: str
    query_prompt: str | None
    num_items: int
    is_read_only: bool
    object: str = "vector_store"
    status: str = "completed"
    expires_after: dict[str, Any] | None = None
    expires_at: int | None = None

    @classmethod
    def of(cls, record: wire.StoreRecord) -> "VectorStore":
        days = record.expires_after_days
        return copy_fields(
            record,
            cls,
            usage_bytes=record.num_bytes,
            file_counts=FileCounts(record.num_files, record.num_files),
            embedding_model=record.model,
            embedding_digest=record.digest,
            query_prompt=None if record.uses_model_prompt else record.query_prompt,
            expires_after={"anchor": "last_active_at", "days": days} if days else None,
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
    """The text of an item, or the stored name of its image, such as a URL."""

    type: str
    text: str = ""
    image_url: dict[str, str] = {}


class StoredItem(msgspec.Struct):
    """An item. `embedding`, if requested, is the normalized vector: little-endian float32 in base64."""

    id: str
    content: list[Content]
    attributes: dict[str, str | bool | float]
    embedding: str | UnsetType = UNSET
    object: str = "vector_store.item"


class ItemList(Listing[StoredItem]):
    pass


class SearchHit(msgspec.Struct):
    """A chunk of a file, or an item. For an item, `file_id` and `filename` are its id."""

    id: str
    file_id: str
    filename: str
    score: float
    attributes: dict[str, str | bool | float]
    content: list[Content]


class SearchPage(msgspec.Struct):
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
    def of(cls, record: wire.StoreFile) -> "StoreFileObject":
        sizes = {
            "max_chunk_size_tokens": record.max_chunk_tokens,
            "chunk_overlap_tokens": record.chunk_overlap_tokens,
        }
        error = {"code": record.error_code, "message": record.error}
        return copy_fields(
            record,
            cls,
            vector_store_id=record.store_id,
            usage_bytes=record.num_bytes,
            chunking_strategy={"type": "static", "static": sizes},
            last_error=error if record.error_code else None,
        )


class FileBatchObject(msgspec.Struct):
    id: str
    created_at: int
    vector_store_id: str
    file_counts: FileCounts
    status: str = "completed"
    object: str = "vector_store.file_batch"

    @classmethod
    def of(cls, batch: wire.FileBatch) -> "FileBatchObject":
        num_failed = sum(file.status == "failed" for file in batch.files)
        total = len(batch.files)
        counts = FileCounts(total - num_failed, total, failed=num_failed)
        return cls(batch.id, batch.created_at, batch.store_id, counts)


class StoreFileList(Listing[StoreFileObject]):
    pass


class FileContent(msgspec.Struct):
    data: list[Content]
    has_more: bool = False
    next_page: None = None
    object: str = "vector_store.file_content.page"


def _content(item: wire.Item) -> list[Content]:
    texts = [Content("text", item.text)] if item.text else []
    return texts + ([Content("image_url", image_url={"url": item.image})] if item.image else [])


def to_stored(item: wire.Item) -> StoredItem:
    vector = base64.b64encode(item.vector).decode() if item.vector else UNSET
    return StoredItem(item.id, _content(item), item.attributes, vector)


def to_hit(hit: wire.Hit) -> SearchHit:
    item = hit.item
    file_id, filename = item.file_id or item.id, item.filename or item.id
    return SearchHit(item.id, file_id, filename, hit.score, item.attributes, _content(item))


def check_text(param: str, value: str) -> str:
    """Raises: InvalidRequest for control characters, which are unsafe in logs and files."""
    if any(ord(character) < 32 or 0xD800 <= ord(character) < 0xE000 for character in value):
        raise invalid(param, "send it without control characters")
    return value


def find_prompt(param: str, asked: str | None, card: ModelCard, usual: Sequence[str]) -> str:
    """The requested prompt, or else the first of `usual` that the model has. Raises: InvalidRequest."""
    if asked is None:
        return next((name for name in usual if name in card.prompts), "")
    return asked and check_prompt(asked, param, card)


def pack_vector(vector: Vector, param: str) -> bytes:
    """Encode a vector as little-endian float32. Raises: InvalidRequest."""
    if not isinstance(vector, str):
        data = array("f", vector).tobytes()
    else:
        try:
            data = base64.b64decode(vector, validate=True)
        except ValueError:
            data = b"?"
    if not data or len(data) % 4:
        raise invalid(param, "send at least one number, or float32 in base64")
    return data


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
    """Refuse control characters in keys, and numbers that are not finite. Raises: InvalidRequest."""
    for key, value in (attributes or {}).items():
        check_text(param, key)
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(param, "send finite numbers")


def check_items(items: Sequence[ItemInput], limits: LimitSettings) -> None:
    check_num("items", len(items), limits.max_inputs, "items")
    places: dict[str, int] = {}
    for index, item in enumerate(items):
        place = f"items.[{index}]"
        check_text(f"{place}.id", item.id)
        if places.setdefault(item.id, index) != index:
            raise invalid(f"{place}.id", f"items.[{places[item.id]}] has this id too; send another")
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


def check_filter(where: wire.Filter | None, limits: LimitSettings) -> None:
    """Raises: InvalidRequest that names the invalid part."""
    num_left = limits.max_filters

    def check(part: wire.Filter, param: str, depth: int) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise invalid("filters", f"send at most {limits.max_filters} filters")
        if depth > limits.max_filter_depth:
            raise invalid("filters", f"nest at most {limits.max_filter_depth} levels")
        if part.type in ("and", "or"):
            if part.key or part.value is not None or not part.filters:
                raise invalid(param, f"send {part.type} with filters only, and at least one filter")
            for index, inner in enumerate(part.filters):
                check(inner, f"{param}.filters.[{index}]", depth + 1)
        else:
            _check_comparison(part, param)

    if where is not None:
        check(where, "filters", 1)


def _check_comparison(part: wire.Filter, param: str) -> None:
    if part.filters or not 0 < len(part.key) <= MAX_METADATA_KEY_CHARS:
        raise invalid(f"{param}.key", f"send a key of 1 to {MAX_METADATA_KEY_CHARS} characters")
    values = part.value if isinstance(part.value, list) else [part.value]
    if isinstance(part.value, list) != (part.type in ("in", "nin")) or part.value is None:
        raise invalid(f"{param}.value", "send a list for in and nin, and one value for other types")
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
    """The texts, the inputs to embed and the vectors of a query. Raises: InvalidRequest."""
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
    """Number of tokens of a chunk, and of its overlap with the previous chunk."""
    if strategy is None or strategy.type == "auto" or strategy.static is None:
        size = min(CHUNK_TOKENS, max(1, int(card.max_model_len * _CHUNK_SHARE)))
        return size, min(OVERLAP_TOKENS, size // 2)
    return strategy.static.max_chunk_size_tokens, strategy.static.chunk_overlap_tokens


def decode_text(file: wire.FileRecord) -> str:
    """Raises: InvalidRequest."""
    try:
        text = file.data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        message = "The file is not UTF-8 text: convert it before you upload it."
        raise InvalidRequest(message, param="file_id", code="unsupported_file")
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


#: Number of hits that a reranker gets, per requested hit.
_RERANK_FACTOR = 4
#: Size limit of a page of items; the first item is always included.
_MAX_PAGE_BYTES = 4 * MIB
_NO_RANKERS = ("none", "auto", "default-2024-11-15")

_STORES = "/v1/vector_stores"
_STORE = _STORES + "/{vector_store_id}"
_ITEMS = _STORE + "/items"
_FILES = _STORE + "/files"
_FILE = _FILES + "/{file_id}"
_BATCHES = _STORE + "/file_batches"
_BATCH = _BATCHES + "/{batch_id}"


class VectorStores(Resource):
    tag = "vector stores"

    def __init__(self, lifecycle: Lifecycle, search: SearchClient, default_store: str) -> None:
        self._lifecycle = lifecycle
        self._search = search
        self._limits = lifecycle.limits
        self._default_store = default_store
        self._embeddings = Embeddings(self._limits)
        self._reranking = Reranking(self._limits)

    # Stores

    @operation("POST", _STORES)
    async def create_vector_store(self, caller: Caller, body: CreateStoreRequest) -> VectorStore:
        """Create a vector store."""
        check_metadata(body.metadata)
        card = await self._choose_model(body.embedding_model, caller.context.tenant)
        check_dimensions(body.dimensions, card)
        create = wire.CreateStore(
            tenant=caller.tenant,
            name=check_text("name", body.name or ""),
            model=card.name,
            digest=card.digest,
            dimensions=body.dimensions or card.dimensions,
            prompt=find_prompt("prompt", body.prompt, card, DOCUMENT_PROMPTS),
            query_prompt=find_prompt("query_prompt", body.query_prompt, card, QUERY_PROMPTS),
            metadata=body.metadata or {},
            expires_after_days=body.expires_after.days if body.expires_after else 0,
        )
        store = await self._search.ask(create)
        if not body.file_ids:
            return VectorStore.of(store)
        strategy = body.chunking_strategy
        wanted = [
            AttachFileRequest(file_id=name, chunking_strategy=strategy) for name in body.file_ids
        ]
        try:
            files = await self._attach_all(wanted, store, caller)
        except BaseException:  # the client would not learn the store's id
            await self._search.ask(wire.DropStore(tenant=caller.tenant, store=store.id))
            raise
        made = VectorStore.of(await self._find(caller, store.id))
        made.file_counts.failed = sum(file.status == "failed" for file in files)
        made.file_counts.total = len(files)
        return made

    async def _choose_model(self, name: str | None, tenant: str) -> ModelCard:
        """The card of an embedding model. Raises: ApiError, QueueUnavailable, RedisError."""
        models = self._lifecycle.models
        if name is None:
            cards = [
                card
                for card in models.served()
                if "embed" in card.tasks and models.may_use(tenant, card.name)
            ]
            served = [card for card in cards if models.num_workers[card.queue]]
            cards = served or cards  # prefer models that have workers
            if len(cards) == 1:
                return cards[0]
            names = ", ".join(sorted(card.name for card in cards)) or "none"
            raise invalid("embedding_model", f"name an embedding model: {names}")
        card = await models.find(name, task="embed", tenant=tenant, param="embedding_model")
        if "embed" not in card.tasks:
            offered = ", ".join(card.tasks)
            message = f"This model makes no embeddings; it supports: {offered}."
            raise InvalidRequest(message, param="embedding_model", code="wrong_task")
        return card

    @operation("GET", _STORES)
    async def list_vector_stores(self, caller: Caller, query: ListQuery) -> StoreList:
        """List vector stores."""
        asked = wire.ListStores(tenant=caller.tenant, page=query.page)
        records, has_more = query.cut(await self._search.ask(asked))
        return StoreList.of([VectorStore.of(record) for record in records], has_more)

    @operation("GET", _STORE)
    async def retrieve_vector_store(self, caller: Caller) -> VectorStore:
        """Retrieve a vector store."""
        return VectorStore.of(await self._find(caller))

    async def _ask(
        self,
        caller: Caller,
        kind: Callable[..., wire.Request[T]],
        rename: Callable[[str], str | None] | None = None,
        **fields: Any,
    ) -> T:
        """Send a request about a store, by default the path's. `rename`: see `SearchClient.ask`. Raises: ApiError."""
        asked = {"tenant": caller.tenant, "store": caller.path.get("vector_store_id"), **fields}
        return await self._search.ask(kind(**asked), rename)

    async def _find(self, caller: Caller, name: str | None = None) -> wire.StoreRecord:
        if name is None:
            name = caller.path["vector_store_id"]
            if not name.startswith(wire.STORE_ID):  # names are for the operator's settings only
                raise no_such("vector store", "vector_store_id")
        return await self._ask(caller, wire.ReadStore, store=name)

    @operation("POST", _STORE)
    async def modify_vector_store(self, caller: Caller, body: ChangeStoreRequest) -> VectorStore:
        """Modify a vector store."""
        check_metadata(body.metadata)
        days = body.expires_after.days if body.expires_after else 0
        changed = await self._ask(
            caller,
            wire.ChangeStore,
            name=None if body.name is None else check_text("name", body.name),
            metadata=body.metadata,
            expires_after_days=None if body.expires_after is UNSET else days,
        )
        return VectorStore.of(changed)

    @operation("DELETE", _STORE)
    async def delete_vector_store(self, caller: Caller) -> Deleted:
        """Delete a vector store."""
        await self._ask(caller, wire.DropStore)
        return Deleted(caller.path["vector_store_id"], "vector_store.deleted")

    # Items

    @operation("PUT", _ITEMS, unsupported=UNSUPPORTED["/v1/vector_stores/{id}/items"])
    async def put_items(self, caller: Caller, body: PutItemsRequest) -> ItemsStored:
        """Insert or replace items."""
        items = body.items
        check_items(items, self._limits)
        images = [
            name_of_image(item.image, f"items.[{index}].image") for index, item in enumerate(items)
        ]
        store = await self._find(caller)
        vectors: dict[int, bytes] = {}
        parts: dict[int, str | ImageSource] = {}
        names: list[str] = []
        for index, item in enumerate(items):
            name = f"items.[{index}]"
            if item.embedding is not None:
                vectors[index] = pack_vector(item.embedding, f"{name}.embedding")
            elif item.image is not None:
                parts[index] = to_image(item.image, f"{name}.image")
                names.append(name)
            else:
                parts[index] = item.text or ""
                names.append(f"{name}.text")
        made = await self._embed(list(parts.values()), names, store, store.prompt, caller)
        vectors |= dict(zip(parts, made, strict=True))
        stored = [
            wire.Item(
                id=item.id,
                vector=vectors[index],
                text=item.text or "",
                image=images[index],
                attributes=dict(item.attributes or {}),
            )
            for index, item in enumerate(items)
        ]
        record = await self._ask(
            caller,
            wire.PutItems,
            lambda index: f"items.[{index}].embedding" if index.isdigit() else index,
            digest=store.digest if parts else "",
            items=stored,
        )
        return ItemsStored(len(items), VectorStore.of(record))

    @operation("GET", _ITEMS)
    async def list_items(self, caller: Caller, query: ItemsQuery) -> ItemList:
        """List items."""
        page = wire.Page(limit=query.limit, after=query.after)
        items = await self._read_items(caller, query.include, page=page)
        data, num_bytes = [], 0
        for item in items[: query.limit]:
            stored = to_stored(item)
            num_bytes += len(msgspec.json.encode(stored))
            if data and num_bytes > _MAX_PAGE_BYTES:
                break
            data.append(stored)
        return ItemList.of(data, len(items) > len(data))

    @operation("GET", _ITEMS + "/{item_id:path}")
    async def retrieve_item(self, caller: Caller, query: ItemQuery) -> StoredItem:
        """Retrieve an item."""
        items = await self._read_items(caller, query.include, ids=[caller.path["item_id"]])
        if not items:
            raise no_such("item", "item_id")
        return to_stored(items[0])

    async def _read_items(self, caller: Caller, include: str, **which: Any) -> Sequence[wire.Item]:
        await self._find(caller)
        return await self._ask(caller, wire.ReadItems, with_vectors=include == "embedding", **which)

    @operation("DELETE", _ITEMS)
    async def delete_items(self, caller: Caller, body: DeleteItemsRequest) -> ItemsDeleted:
        """Delete items by ids or filter."""
        if (body.ids is None) == (body.filters is None):
            raise invalid("ids", "send either ids or filters")
        check_num("ids", len(body.ids or ()), self._limits.max_inputs, "ids")
        check_filter(body.filters, self._limits)
        await self._find(caller)
        ids = None if body.ids is None else list(dict.fromkeys(body.ids))
        return ItemsDeleted(await self._ask(caller, wire.DropItems, ids=ids, where=body.filters))

    # Search

    @operation("POST", _STORE + "/search")
    async def search_vector_store(self, caller: Caller, body: SearchRequest) -> SearchPage:
        """Search a vector store."""
        if body.rewrite_query:
            raise unsupported("rewrite_query")
        check_filter(body.filters, self._limits)
        texts, parts, vectors = read_query(body.query)
        check_num("queries", len(texts), self._limits.max_search_queries, "query")
        many = isinstance(body.query, list)
        names = [f"query.[{index}]" if many else "query" for index in range(len(parts))]
        store = await self._find(caller)
        made = await self._embed(parts, names, store, VectorStore.of(store).query_prompt, caller)
        options = body.ranking_options or RankingOptions()
        wanted = body.max_num_results or 10
        ranker = None if options.ranker in (None, *_NO_RANKERS) else options.ranker
        if ranker and not texts:
            raise invalid("ranking_options.ranker", "a ranker requires a text query")
        name = "query.embedding" if vectors else "query"
        hits = await self._ask(
            caller,
            wire.Query,
            lambda param: name if param.isdigit() else param,
            digest=store.digest if parts else "",
            vectors=[*made, *vectors],
            k=wanted * _RERANK_FACTOR if ranker else wanted,
            where=body.filters,
        )
        if ranker:
            hits = (await self._rerank(ranker, texts, hits, caller))[:wanted]
        least = options.score_threshold
        kept = [hit for hit in hits if least is None or hit.score >= least]
        return SearchPage(texts, [to_hit(hit) for hit in kept])

    @operation("POST", "/similar")
    async def similar(self, caller: Caller, body: SimilarRequest) -> SimilarAnswer:
        """Find the nearest items of the default store."""
        words = body.keywords
        text = body.text or (words if isinstance(words, str) else " ".join(words or ()))
        if (body.text is None) == (words is None) or not text:
            raise invalid("text", "send either text or keywords")
        if not self._default_store:
            message = "There is no default store: set VLM_SEARCH__DEFAULT_STORE at the gateway."
            raise NotFound(message, code="search_not_served")
        store = await self._find(caller, self._default_store)
        made = await self._embed(
            [text], ["text"], store, VectorStore.of(store).query_prompt, caller
        )
        asked = {"digest": store.digest, "vectors": made, "k": body.num_results}
        hits = await self._ask(caller, wire.Query, store=store.id, **asked)
        shown = ((h.item.text or h.item.image, h.item.id, h.score) for h in hits)
        return SimilarAnswer([f"Item: {t} (index: {i} score:{score:.2f})" for t, i, score in shown])

    # Files

    @operation("POST", _FILES)
    async def create_vector_store_file(
        self, caller: Caller, body: AttachFileRequest
    ) -> StoreFileObject:
        """Attach a file. Returns when all chunks are on disk."""
        check_attributes(body.attributes, "attributes")
        store = await self._find(caller)
        return StoreFileObject.of(await self._attach(body, store, caller))

    async def _attach(
        self, request: AttachFileRequest, store: wire.StoreRecord, caller: Caller
    ) -> wire.StoreFile:
        """Raises: ApiError, QueueUnavailable."""
        card = await self._lifecycle.models.find(store.model, tenant=caller.context.tenant)
        size, overlap = chunk_sizes(request.chunking_strategy, card)
        asked = wire.ReadFile(tenant=caller.tenant, file=request.file_id, with_data=True)
        file = await self._search.ask(asked)
        caller.held.add(len(file.data))
        chunks = cut_chunks(decode_text(file), size, overlap)
        if len(chunks) > self._limits.max_inputs:
            raise InvalidRequest(
                f"The file has {len(chunks)} chunks, at most {self._limits.max_inputs} are allowed: send a "
                "smaller file, larger chunks or less overlap.",
                param="chunking_strategy",
                code="too_many_inputs",
            )
        # If a chunk has more tokens than estimated, only its first tokens are embedded, but all of its text is stored.
        vectors = await self._embed(
            chunks, ["file_id"] * len(chunks), store, store.prompt, caller, truncate="end"
        )
        attributes = dict(request.attributes or {})
        items = [
            wire.Item(
                id=f"{file.id}:{number}",
                vector=vector,
                text=text,
                file_id=file.id,
                filename=file.filename,
                attributes=attributes,
            )
            for number, (text, vector) in enumerate(zip(chunks, vectors, strict=True))
        ]
        return await self._ask(
            caller,
            wire.AttachFile,
            store=store.id,
            file=file.id,
            digest=store.digest,
            items=items,
            max_chunk_tokens=size,
            chunk_overlap_tokens=overlap,
            attributes=attributes,
        )

    async def _attach_all(
        self, requests: Sequence[AttachFileRequest], store: wire.StoreRecord, caller: Caller
    ) -> list[wire.StoreFile]:
        """Attach files one by one; a failure does not stop the others.

        Raises: ApiError if workers or search are unavailable, or the key has expired or is limited; QueueUnavailable.
        """
        files = []
        for request in requests:
            try:
                files.append(await self._attach(request, store, caller))
            except ApiError as error:
                if error.status >= 500 or error.status in (401, 403, 429):
                    raise
                failed = wire.StoreFile(
                    id=request.file_id, store_id=store.id, filename="", status="failed",
                    created_at=int(time.time()),  # noqa: TID251
                    num_chunks=0, num_bytes=0, max_chunk_tokens=0, chunk_overlap_tokens=0,
                    attributes=dict(request.attributes or {}),
                    error_code="unsupported_file" if error.code == "unsupported_file" else "invalid_file",
                    error=error.message,
                )  # fmt: skip
                files.append(failed)
        return files

    @operation("POST", _FILE)
    async def update_vector_store_file(
        self, caller: Caller, body: ChangeFileRequest
    ) -> StoreFileObject:
        """Change a file's attributes."""
        check_attributes(body.attributes, "attributes")
        asked = {"file": caller.path["file_id"], "attributes": dict(body.attributes or {})}
        return StoreFileObject.of(await self._ask(caller, wire.ChangeStoreFile, **asked))

    @operation("POST", _BATCHES)
    async def create_vector_store_file_batch(
        self, caller: Caller, body: FileBatchRequest
    ) -> FileBatchObject:
        """Attach files. Returns when all are attached."""
        if (body.file_ids is None) == (body.files is None):
            raise invalid("file_ids", "send either file_ids or files")
        if body.files is not None and (body.attributes or body.chunking_strategy):
            raise invalid("files", "send attributes and chunking_strategy in each entry of files")
        check_attributes(body.attributes, "attributes")
        files = body.files or [
            AttachFileRequest(
                file_id=name, attributes=body.attributes, chunking_strategy=body.chunking_strategy
            )
            for name in body.file_ids or ()
        ]
        for index, file in enumerate(files):
            check_attributes(file.attributes, f"files.[{index}].attributes")
        store = await self._find(caller)
        attached = await self._attach_all(files, store, caller)
        return FileBatchObject.of(await self._ask(caller, wire.PutFileBatch, files=attached))

    @operation("GET", _BATCH)
    async def retrieve_vector_store_file_batch(self, caller: Caller) -> FileBatchObject:
        """Retrieve a file batch."""
        return FileBatchObject.of(await self._find_batch(caller))

    @operation("POST", _BATCH + "/cancel")
    async def cancel_vector_store_file_batch(self, caller: Caller) -> FileBatchObject:
        """Cancel a file batch. Has no effect, because a file batch is complete when it is created."""
        return FileBatchObject.of(await self._find_batch(caller))

    async def _find_batch(self, caller: Caller) -> wire.FileBatch:
        return await self._ask(caller, wire.ReadFileBatch, batch=caller.path["batch_id"])

    @operation("GET", _BATCH + "/files")
    async def list_files_in_vector_store_batch(
        self, caller: Caller, query: FilesQuery
    ) -> StoreFileList:
        """List the files of a file batch."""
        files = (await self._find_batch(caller)).files
        chosen = [file for file in files if query.filter in ("", file.status)]
        files, has_more = query.choose(chosen)
        return StoreFileList.of([StoreFileObject.of(file) for file in files], has_more)

    @operation("GET", _FILES)
    async def list_vector_store_files(self, caller: Caller, query: FilesQuery) -> StoreFileList:
        """List attached files; all are completed."""
        await self._find(caller)
        if query.filter not in ("", "completed"):
            return StoreFileList.of([], False)
        found = await self._ask(caller, wire.ListStoreFiles, page=query.page)
        records, has_more = query.cut(found)
        return StoreFileList.of([StoreFileObject.of(record) for record in records], has_more)

    @operation("GET", _FILE)
    async def retrieve_vector_store_file(self, caller: Caller) -> StoreFileObject:
        """Retrieve an attached file."""
        return StoreFileObject.of(await self._find_file(caller))

    async def _find_file(self, caller: Caller) -> wire.StoreFile:
        return await self._ask(caller, wire.ReadStoreFile, file=caller.path["file_id"])

    @operation("GET", _FILE + "/content")
    async def retrieve_vector_store_file_content(self, caller: Caller) -> FileContent:
        """Retrieve the chunks of an attached file."""
        file = await self._find_file(caller)
        ids = [f"{file.id}:{number}" for number in range(file.num_chunks)]
        items = {item.id: item for item in await self._ask(caller, wire.ReadItems, ids=ids)}
        return FileContent([Content("text", items[key].text) for key in ids if key in items])

    @operation("DELETE", _FILE)
    async def delete_vector_store_file(self, caller: Caller) -> Deleted:
        """Detach a file."""
        name = caller.path["file_id"]
        await self._ask(caller, wire.DetachFile, file=name)
        return Deleted(name, "vector_store.file.deleted")

    # Vectors and scores, by calls to workers

    async def _embed(
        self,
        parts: Sequence[str | ImageSource],
        names: Sequence[str],
        store: wire.StoreRecord,
        prompt: str | None,
        caller: Caller,
        truncate: Truncate = "none",
    ) -> list[bytes]:
        """Embed texts and images with the store's model. `names`: field names of the inputs. Raises: ApiError."""
        if not parts:
            return []
        if truncate == "none":
            num_chars = sum(len(part) for part in parts if isinstance(part, str))
            check_chars(num_chars, self._limits.max_input_chars, names[0].partition(".")[0])
        card = await self._lifecycle.models.find(store.model, tenant=caller.context.tenant)
        if card.digest != store.digest:
            raise conflict(wire.MODEL_CHANGED, code="model_changed", param="embedding_model")
        dimensions = store.dimensions if store.dimensions != card.dimensions else None
        prompt = find_prompt("query_prompt", prompt, card, QUERY_PROMPTS)
        task = Embed((), prompt_name=prompt, dimensions=dimensions, truncate=truncate)
        images = [part for part in parts if isinstance(part, ImageSource)]
        places = {id(image): place for place, image in enumerate(images)}
        inputs = [
            TextPart(part) if isinstance(part, str) else ImagePart(places[id(part)])
            for part in parts
        ]
        tasks = split_inputs(task, inputs, card, {})
        is_large = len(parts) > self._limits.max_search_queries
        priority = Priority.BATCH if is_large else Priority.INTERACTIVE
        plan = Plan(tasks, NoOptions(), images, num_prompts=len(tasks), priority=priority)
        try:
            events = await self._lifecycle.compute(
                self._embeddings, plan, card, caller.context, caller.held
            )
        except ApiError as error:
            error.param = _rename(error.param, names)
            raise
        return [bytes(row) for row in rows_of(events)]

    async def _rerank(
        self, model: str, texts: Sequence[str], hits: Sequence[wire.Hit], caller: Caller
    ) -> list[wire.Hit]:
        """Sort hits by a reranker's scores for the first query text. Hits without text come last."""
        param, tenant = "ranking_options.ranker", caller.context.tenant
        card = await self._lifecycle.models.find(model, task="rerank", tenant=tenant, param=param)
        scored = [hit for hit in hits if hit.item.text]
        if not scored:
            return list(hits)
        documents = [hit.item.text for hit in scored]
        tasks = split_documents(Rerank((texts[0],), (), truncate="end"), documents, {})
        plan = Plan(tasks, NoOptions(), num_prompts=len(tasks))
        try:
            events = await self._lifecycle.compute(
                self._reranking, plan, card, caller.context, caller.held
            )
        except InvalidRequest as error:
            error.param = param if error.param == "model" else "query"
            raise
        ranked = [
            wire.Hit(item=hit.item, score=score)
            for hit, score in zip(scored, scores_of(events), strict=True)
        ]
        ranked.sort(key=lambda hit: (-hit.score, hit.item.id))
        return ranked + [wire.Hit(item=hit.item, score=0.0) for hit in hits if not hit.item.text]


def _rename(param: str | None, names: Sequence[str]) -> str | None:
    """Translate a worker's field name, such as `input.[3].image`, to the client's."""
    if param is None or not param.startswith("input.["):
        return param
    index, _, rest = param.removeprefix("input.[").partition("]")
    return names[int(index)] + rest
