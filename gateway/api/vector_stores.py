"""`/v1/vector_stores`: stores, their items, their files, and search.

As OpenAI defines it, with `items` beside its files: vectors, texts and images under ids of the
client's own. A store's model is chosen when it is made and stays.

Source: OpenAI API reference, "Vector stores", "Vector store files".
"""

import base64
import binascii
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.api.embeddings import Embeddings, rows_of
from gateway.api.fields import invalid
from gateway.api.inputs import CHARS_PER_TOKEN, ModelName, RequestStruct, split
from gateway.api.rerank import Reranking, scores_of
from gateway.api.routes import Caller, Operation, body_of
from gateway.calls.key_limits import TOKENS_PER_IMAGE
from gateway.calls.lifecycle import Lifecycle
from gateway.calls.surface import Plan
from gateway.http.body import unsupported
from gateway.http.errors import ApiError, InvalidRequest, NotFound
from gateway.images.loader import ImageSource
from gateway.search import SearchClient
from shared.protocol import Embed, ImagePart, ModelCard, Priority, Rerank, TextPart, Truncate
from shared.search import (
    STORE_ID,
    AttachFile,
    ChangeStore,
    CreateStore,
    DetachFile,
    DropItems,
    DropStore,
    FileRecord,
    Filter,
    Hit,
    Item,
    ListStoreFiles,
    ListStores,
    Page,
    PutItems,
    Query,
    ReadFile,
    ReadItems,
    ReadStore,
    ReadStoreFile,
    StoreFile,
    StoreRecord,
)
from shared.settings.limits import (
    MAX_FILTER_VALUES,
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
ItemId = Annotated[str, Meta(min_length=1, max_length=MAX_ITEM_ID_CHARS)]
Vector = list[float] | str
#: OpenAI's: of the chunks of a file, in tokens.
CHUNK_TOKENS, OVERLAP_TOKENS = 800, 400
#: Of a model's context, what a chunk of estimated tokens takes.
_CHUNK_SHARE = 0.75
#: Where a chunk rather ends, the best first; in its last quarter.
_ENDS = ("\n\n", "\n", ". ", " ")
#: Hits that a model is asked to order, for each that is wanted.
_RERANK_FACTOR = 4
_DOCUMENT_PROMPTS = ("document", "passage", "search_document")
_QUERY_PROMPTS = ("query", "search_query")
_NO_RANKERS = ("none", "auto", "default-2024-11-15")


# What clients send


class CreateStoreRequest(RequestStruct, frozen=True, kw_only=True):
    """The body of `POST /v1/vector_stores`."""

    name: StoreName | None = None
    metadata: Metadata | None = None
    #: ours: which model makes its vectors; without it, the only one that is served
    embedding_model: ModelName | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None  #: ours: as in an embedding request
    prompt: str | None = None  #: ours: the model's prompt before what is stored
    query_prompt: str | None = None  #: ours: and before what is searched


class ChangeStoreRequest(RequestStruct, frozen=True, kw_only=True):
    """The body of `POST /v1/vector_stores/{id}`."""

    name: StoreName | None = None
    metadata: Metadata | None = None


class ItemInput(RequestStruct, frozen=True, kw_only=True):
    """An item: what it is made of, and its vector where the client has it already.

    `embedding`: numbers, or little-endian float32 in base64.
    """

    id: ItemId
    text: str | None = None
    image: str | None = None
    embedding: Vector | None = None
    attributes: ItemAttributes | None = None


class PutItemsRequest(RequestStruct, frozen=True, kw_only=True):
    """The body of `PUT /v1/vector_stores/{id}/items`."""

    items: Annotated[list[ItemInput], Meta(min_length=1)]


class DeleteItemsRequest(RequestStruct, frozen=True, kw_only=True):
    """The body of `DELETE /v1/vector_stores/{id}/items`: ids, or a filter."""

    ids: Annotated[list[ItemId], Meta(min_length=1)] | None = None
    filters: Filter | None = None


class QueryInput(RequestStruct, frozen=True, kw_only=True):
    """What to search, where it is no plain text."""

    text: str | None = None
    image: str | None = None
    embedding: Vector | None = None


class RankingOptions(RequestStruct, frozen=True, kw_only=True):
    """`ranker`: none, or a model that scores pairs."""

    score_threshold: Annotated[float, Meta(ge=-1, le=1)] | None = None
    ranker: ModelName | None = None


class SearchRequest(RequestStruct, frozen=True, kw_only=True):
    """The body of `POST /v1/vector_stores/{id}/search`."""

    query: str | Annotated[list[str], Meta(min_length=1)] | QueryInput
    max_num_results: Annotated[int, Meta(ge=1, le=MAX_SEARCH_RESULTS)] | None = None
    filters: Filter | None = None
    ranking_options: RankingOptions | None = None
    rewrite_query: bool | None = None


class StaticChunks(RequestStruct, frozen=True, kw_only=True):
    """Sizes in tokens, of four characters each."""

    max_chunk_size_tokens: Annotated[int, Meta(ge=100, le=4096)]
    chunk_overlap_tokens: Annotated[int, Meta(ge=0)]


class ChunkingStrategy(RequestStruct, frozen=True, kw_only=True):
    """`auto`, or `static` with its sizes."""

    type: Literal["auto", "static"]
    static: StaticChunks | None = None


class AttachFileRequest(RequestStruct, frozen=True, kw_only=True):
    """The body of `POST /v1/vector_stores/{id}/files`."""

    file_id: ItemId
    attributes: ItemAttributes | None = None
    chunking_strategy: ChunkingStrategy | None = None


class ListQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of a list."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Annotated[str, Meta(max_length=MAX_ITEM_ID_CHARS)] = ""
    before: Annotated[str, Meta(max_length=MAX_ITEM_ID_CHARS)] = ""

    @property
    def page(self) -> Page:
        """As the search process has it."""
        return Page(
            limit=self.limit,
            after=self.after,
            before=self.before,
            is_ascending=self.order == "asc",
        )

    def cut(self, entries: list[Any]) -> tuple[list[Any], bool]:
        """The page, and whether there is more: one more entry than the limit came then."""
        kept = entries[-self.limit :] if self.before else entries[: self.limit]
        return kept, len(entries) > self.limit


class ItemsQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of the items, in the order of their ids. `include`: `embedding`."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 20
    after: Annotated[str, Meta(max_length=MAX_ITEM_ID_CHARS)] = ""
    include: Literal["", "embedding"] = ""


class ItemQuery(msgspec.Struct, frozen=True, kw_only=True):
    """`include`: `embedding`."""

    include: Literal["", "embedding"] = ""


# What is answered


class FileCounts(msgspec.Struct):
    """By status; all are completed when they are answered."""

    completed: int
    total: int
    in_progress: int = 0
    failed: int = 0
    cancelled: int = 0


class VectorStore(msgspec.Struct):
    """OpenAI's object, and what is ours from `embedding_model` on."""

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
    expires_after: None = None
    expires_at: None = None

    @classmethod
    def of(cls, record: StoreRecord) -> "VectorStore":
        """Of what the search process knows."""
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
        )


class StoreList(msgspec.Struct):
    """A page of stores."""

    data: list[VectorStore]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class Deleted(msgspec.Struct):
    """What is gone."""

    id: str
    object: str
    deleted: bool = True


class ItemsDeleted(msgspec.Struct):
    """How many are gone."""

    num_deleted: int
    object: str = "vector_store.items.deleted"


class ItemsStored(msgspec.Struct):
    """The items are on disk; the store as it is now."""

    num_items: int
    store: VectorStore
    object: str = "vector_store.items"


class Content(msgspec.Struct, omit_defaults=True):
    """A piece of an item: a text, or an image's URL or SHA-256."""

    type: str
    text: str = ""
    image_url: dict[str, str] = {}


class StoredItem(msgspec.Struct):
    """An item. `embedding`: little-endian float32 in base64, of length 1, where asked for."""

    id: str
    content: list[Content]
    attributes: dict[str, str | bool | float]
    embedding: str | UnsetType = UNSET
    object: str = "vector_store.item"


class ItemList(msgspec.Struct):
    """A page of items."""

    data: list[StoredItem]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class SearchHit(msgspec.Struct):
    """A chunk of a file; or an item, whose id stands for a file's too."""

    id: str
    file_id: str
    filename: str
    score: float
    attributes: dict[str, str | bool | float]
    content: list[Content]


class SearchPage(msgspec.Struct):
    """All hits: there is one page."""

    search_query: list[str]
    data: list[SearchHit]
    has_more: bool = False
    next_page: None = None
    object: str = "vector_store.search_results.page"


class StoreFileObject(msgspec.Struct):
    """A file in a store."""

    id: str
    created_at: int
    vector_store_id: str
    usage_bytes: int
    status: str
    chunking_strategy: dict[str, Any]
    attributes: dict[str, str | bool | float]
    last_error: None = None
    object: str = "vector_store.file"

    @classmethod
    def of(cls, record: StoreFile) -> "StoreFileObject":
        """Of what the search process knows."""
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
        )


class StoreFileList(msgspec.Struct):
    """A page of a store's files."""

    data: list[StoreFileObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: str = "list"


class FileContent(msgspec.Struct):
    """The chunks of a file in a store."""

    data: list[Content]
    has_more: bool = False
    next_page: None = None
    object: str = "vector_store.file_content.page"


_HINTS = {
    "type": "Comparisons are eq, ne, gt, gte, lt, lte, in and nin; and, or join filters.",
    "order": "Send asc or desc.",
}
_CREATE = body_of(CreateStoreRequest)
_CHANGE = body_of(ChangeStoreRequest)
_PUT = body_of(PutItemsRequest)
_DELETE = body_of(DeleteItemsRequest, **_HINTS)
_SEARCH = body_of(SearchRequest, **_HINTS)
_ATTACH = body_of(AttachFileRequest, type="Send auto or static.")


class VectorStores:
    """The operations on stores, over the search process and the fleet."""

    def __init__(
        self, lifecycle: Lifecycle, search: SearchClient, limits: LimitSettings, default_store: str
    ) -> None:
        self._lifecycle = lifecycle
        self._search = search
        self._limits = limits
        self.default_store = default_store
        self._embeddings = Embeddings(limits)
        self._reranking = Reranking(limits)

    def operations(self) -> list[Operation]:
        """All that is served."""
        stores, store = "/v1/vector_stores", "/v1/vector_stores/{vector_store_id}"
        item, file = store + "/items/{item_id}", store + "/files/{file_id}"
        return [
            Operation("POST", stores, "create_vector_store", "Create a vector store",
                      self.create, VectorStore, CreateStoreRequest),
            Operation("GET", stores, "list_vector_stores", "List vector stores",
                      self.list_stores, StoreList, query=ListQuery),
            Operation("GET", store, "retrieve_vector_store", "Retrieve a vector store",
                      self.retrieve, VectorStore),
            Operation("POST", store, "modify_vector_store", "Modify a vector store",
                      self.modify, VectorStore, ChangeStoreRequest),
            Operation("DELETE", store, "delete_vector_store", "Delete a vector store",
                      self.delete, Deleted),
            Operation("POST", store + "/search", "search_vector_store", "Search a vector store",
                      self.search, SearchPage, SearchRequest),
            Operation("PUT", store + "/items", "put_items", "Insert or replace items",
                      self.put_items, ItemsStored, PutItemsRequest),
            Operation("GET", store + "/items", "list_items", "List items",
                      self.list_items, ItemList, query=ItemsQuery),
            Operation("DELETE", store + "/items", "delete_items", "Delete items by ids or filter",
                      self.delete_items, ItemsDeleted, DeleteItemsRequest),
            Operation("GET", item, "retrieve_item", "Retrieve an item",
                      self.retrieve_item, StoredItem, query=ItemQuery),
            Operation("POST", store + "/files", "create_vector_store_file", "Attach a file",
                      self.attach_file, StoreFileObject, AttachFileRequest),
            Operation("GET", store + "/files", "list_vector_store_files", "List attached files",
                      self.list_files, StoreFileList, query=ListQuery),
            Operation("GET", file, "retrieve_vector_store_file", "Retrieve an attached file",
                      self.retrieve_file, StoreFileObject),
            Operation("GET", file + "/content", "retrieve_vector_store_file_content",
                      "Retrieve the chunks of an attached file", self.file_content, FileContent),
            Operation("DELETE", file, "delete_vector_store_file", "Detach a file",
                      self.detach_file, Deleted),
        ]  # fmt: skip

    # Stores

    async def create(self, caller: Caller) -> VectorStore:
        """`POST /v1/vector_stores`"""
        request = _CREATE.decode(caller.body)
        card = await self._choose_model(request.embedding_model)
        allowed = (*card.shorter_dimensions, card.dimensions)
        if request.dimensions is not None and request.dimensions not in allowed:
            raise invalid("dimensions", f"this model has {', '.join(map(str, allowed))}")
        create = CreateStore(
            tenant=caller.tenant,
            name=_text("name", request.name or ""),
            model=card.name,
            digest=card.digest,
            dimensions=request.dimensions or card.dimensions,
            prompt=_find_prompt("prompt", request.prompt, card, _DOCUMENT_PROMPTS),
            query_prompt=_find_prompt("query_prompt", request.query_prompt, card, _QUERY_PROMPTS),
            metadata=request.metadata or {},
        )
        return VectorStore.of(await self._search.ask(create, StoreRecord))

    async def _choose_model(self, name: str | None) -> ModelCard:
        """The card of a model that makes vectors. Raises: ApiError, QueueUnavailable, RedisError."""
        models = self._lifecycle.models
        if name is None:
            cards = [card for card in models.cards.values() if "embed" in card.tasks]
            if len(cards) == 1:
                return cards[0]
            names = ", ".join(sorted(card.name for card in cards)) or "none"
            raise invalid("embedding_model", f"name one of those that make vectors: {names}")
        try:
            card = await models.find(name)
        except NotFound as error:
            raise NotFound(error.message, param="embedding_model", code=error.code) from None
        if "embed" not in card.tasks:
            offered = ", ".join(card.tasks)
            raise InvalidRequest(
                f"This model makes no vectors; it offers: {offered}.",
                param="embedding_model",
                code="wrong_task",
            )
        return card

    async def list_stores(self, caller: Caller) -> StoreList:
        """`GET /v1/vector_stores`"""
        query = caller.read_query(ListQuery)
        asked = ListStores(tenant=caller.tenant, page=query.page)
        records, has_more = query.cut(await self._search.ask(asked, list[StoreRecord]))
        data = [VectorStore.of(record) for record in records]
        return StoreList(data, has_more, *_ends(data))

    async def retrieve(self, caller: Caller) -> VectorStore:
        """`GET /v1/vector_stores/{id}`"""
        return VectorStore.of(await self._find(caller))

    async def _find(self, caller: Caller, name: str | None = None) -> StoreRecord:
        if name is None:
            name = caller.path["vector_store_id"]
            if not name.startswith(STORE_ID):  # names are an operator's to use
                raise NotFound(
                    "There is no such vector store.", param="vector_store_id", code="not_found"
                )
        asked = ReadStore(tenant=caller.tenant, store=name)
        return await self._search.ask(asked, StoreRecord)

    async def modify(self, caller: Caller) -> VectorStore:
        """`POST /v1/vector_stores/{id}`"""
        request = _CHANGE.decode(caller.body)
        change = ChangeStore(
            tenant=caller.tenant,
            store=caller.path["vector_store_id"],
            name=None if request.name is None else _text("name", request.name),
            metadata=request.metadata,
        )
        return VectorStore.of(await self._search.ask(change, StoreRecord))

    async def delete(self, caller: Caller) -> Deleted:
        """`DELETE /v1/vector_stores/{id}`"""
        name = caller.path["vector_store_id"]
        await self._search.ask(DropStore(tenant=caller.tenant, store=name), bool)
        return Deleted(name, "vector_store.deleted")

    # Items

    async def put_items(self, caller: Caller) -> ItemsStored:
        """`PUT /v1/vector_stores/{id}/items`"""
        request = _PUT.decode(caller.body)
        items = request.items
        self._check_items(items)
        store = await self._find(caller)
        vectors: dict[int, bytes] = {}
        parts: dict[int, str | ImageSource] = {}
        for index, item in enumerate(items):
            if item.embedding is not None:
                vectors[index] = _pack(item.embedding, f"items.[{index}].embedding")
            elif item.image is not None:
                parts[index] = _image(item.image, f"items.[{index}].image")
            else:
                parts[index] = item.text or ""
        names = [
            f"items.[{index}]" + ("" if isinstance(part, ImageSource) else ".text")
            for index, part in parts.items()
        ]
        made = await self._embed(list(parts.values()), names, store, store.prompt, caller)
        vectors |= dict(zip(parts, made, strict=True))
        put = PutItems(
            tenant=caller.tenant,
            store=store.id,
            digest=store.digest if parts else "",
            items=[
                Item(
                    id=item.id,
                    vector=vectors[index],
                    text=item.text or "",
                    image=_name_image(item.image),
                    attributes=dict(item.attributes or {}),
                )
                for index, item in enumerate(items)
            ],
        )
        record = await self._search.ask(
            put,
            StoreRecord,
            lambda index: f"items.[{index}].embedding" if index.isdigit() else index,
        )
        return ItemsStored(len(items), VectorStore.of(record))

    def _check_items(self, items: Sequence[ItemInput]) -> None:
        """Raises: InvalidRequest."""
        if len(items) > self._limits.max_inputs:
            raise InvalidRequest(
                f"Too many items: send at most {self._limits.max_inputs}.",
                param="items",
                code="too_many_inputs",
            )
        places: dict[str, int] = {}
        for index, item in enumerate(items):
            place = f"items.[{index}]"
            _text(f"{place}.id", item.id)
            if places.setdefault(item.id, index) != index:
                raise invalid(f"{place}.id", f"it is that of items.[{places[item.id]}] too")
            if item.embedding is None and (item.text is None) == (item.image is None):
                raise invalid(place, "send either text or image, or an embedding")
            if item.embedding is None and item.text == "":
                raise invalid(f"{place}.text", "it is empty: send text")
            if len(item.text or "") > self._limits.max_item_chars:
                raise InvalidRequest(
                    f"The text is too long: send at most {self._limits.max_item_chars} characters, "
                    "or a file, which is cut into chunks.",
                    param=f"{place}.text",
                    status=413,
                    code="text_too_long",
                )
            check_attributes(item.attributes, f"{place}.attributes")

    async def list_items(self, caller: Caller) -> ItemList:
        """`GET /v1/vector_stores/{id}/items`"""
        query = caller.read_query(ItemsQuery)
        store = await self._find(caller)
        asked = ReadItems(
            tenant=caller.tenant,
            store=store.id,
            page=Page(limit=query.limit, after=query.after),
            with_vectors=query.include == "embedding",
        )
        items = await self._search.ask(asked, list[Item])
        data = [_to_stored(item) for item in items[: query.limit]]
        return ItemList(data, len(items) > query.limit, *_ends(data))

    async def retrieve_item(self, caller: Caller) -> StoredItem:
        """`GET /v1/vector_stores/{id}/items/{item_id}`"""
        query = caller.read_query(ItemQuery)
        store = await self._find(caller)
        asked = ReadItems(
            tenant=caller.tenant,
            store=store.id,
            ids=[caller.path["item_id"]],
            with_vectors=query.include == "embedding",
        )
        items = await self._search.ask(asked, list[Item])
        if not items:
            raise NotFound("There is no such item.", param="item_id", code="not_found")
        return _to_stored(items[0])

    async def delete_items(self, caller: Caller) -> ItemsDeleted:
        """`DELETE /v1/vector_stores/{id}/items`"""
        request = _DELETE.decode(caller.body)
        if (request.ids is None) == (request.filters is None):
            raise invalid("ids", "send either ids or filters")
        if len(request.ids or ()) > self._limits.max_inputs:
            raise InvalidRequest(
                f"Too many ids: send at most {self._limits.max_inputs}.",
                param="ids",
                code="too_many_inputs",
            )
        if request.filters is not None:
            check_filter(request.filters, self._limits)
        store = await self._find(caller)
        drop = DropItems(
            tenant=caller.tenant,
            store=store.id,
            ids=None if request.ids is None else list(dict.fromkeys(request.ids)),
            where=request.filters,
        )
        return ItemsDeleted(await self._search.ask(drop, int))

    # Search

    async def search(self, caller: Caller) -> SearchPage:
        """`POST /v1/vector_stores/{id}/search`"""
        request = _SEARCH.decode(caller.body)
        self._check_search(request)
        store = await self._find(caller)
        texts, parts, vectors = _read_query(request.query)
        many = isinstance(request.query, list)
        names = [f"query.[{index}]" if many else "query" for index in range(len(parts))]
        made = await self._embed(parts, names, store, store.query_prompt, caller)
        options = request.ranking_options or RankingOptions()
        wanted = request.max_num_results or 10
        ranker = None if options.ranker in (None, *_NO_RANKERS) else options.ranker
        if ranker and not texts:
            raise invalid("ranking_options.ranker", "a model orders by texts: query with one")
        query = Query(
            tenant=caller.tenant,
            store=store.id,
            digest=store.digest if parts else "",
            vectors=[*made, *vectors],
            k=wanted * _RERANK_FACTOR if ranker else wanted,
            where=request.filters,
        )
        name = "query.embedding" if vectors else "query"
        hits = await self._search.ask(query, list[Hit], lambda p: name if p.isdigit() else p)
        if ranker:
            hits = (await self._rerank(ranker, texts, hits, caller))[:wanted]
        least = options.score_threshold
        kept = [hit for hit in hits if least is None or hit.score >= least]
        return SearchPage(texts, [_to_hit(hit) for hit in kept])

    async def find(self, caller: Caller, text: str, num_results: int) -> list[Hit]:
        """The nearest items of the default store."""
        if not self.default_store:
            raise NotFound(
                "There is no default store: set VLM_SEARCH__DEFAULT_STORE at the gateway.",
                code="search_not_served",
            )
        store = await self._find(caller, self.default_store)
        made = await self._embed([text], ["text"], store, store.query_prompt, caller)
        query = Query(
            tenant=caller.tenant, store=store.id, digest=store.digest, vectors=made, k=num_results
        )
        return await self._search.ask(query, list[Hit])

    def _check_search(self, request: SearchRequest) -> None:
        """Raises: InvalidRequest."""
        if request.rewrite_query:
            raise unsupported("rewrite_query")
        if request.filters is not None:
            check_filter(request.filters, self._limits)
        if isinstance(request.query, list) and len(request.query) > self._limits.max_search_queries:
            raise InvalidRequest(
                f"Too many queries: send at most {self._limits.max_search_queries}.",
                param="query",
                code="too_many_inputs",
            )

    async def _rerank(
        self, model: str, texts: Sequence[str], hits: Sequence[Hit], caller: Caller
    ) -> list[Hit]:
        """The hits by a model's scores for the first text; those without text come last."""
        try:
            card = await self._lifecycle.models.find(model)
        except NotFound as error:
            param = "ranking_options.ranker"
            raise NotFound(error.message, param=param, code=error.code) from None
        scored = [hit for hit in hits if hit.item.text]
        if not scored:
            return list(hits)
        documents = [hit.item.text for hit in scored]
        longest = len(texts[0]) // CHARS_PER_TOKEN
        tasks = [
            Rerank((texts[0],), tuple(part), truncate="end", first=first)
            for first, part in split(
                documents, lambda text: longest + len(text) // CHARS_PER_TOKEN + 1, {}
            )
        ]
        plan = Plan(tasks, msgspec.Struct(), shares_prompt=False)
        try:
            events = await self._lifecycle.compute(
                self._reranking, plan, card, caller.context, caller.held
            )
        except InvalidRequest as error:
            error.param = "ranking_options.ranker" if error.param == "model" else "query"
            raise
        ranked = [
            Hit(item=hit.item, score=score)
            for hit, score in zip(scored, scores_of(events), strict=True)
        ]
        ranked.sort(key=lambda hit: (-hit.score, hit.item.id))
        return ranked + [Hit(item=hit.item, score=0.0) for hit in hits if not hit.item.text]

    # Files

    async def attach_file(self, caller: Caller) -> StoreFileObject:
        """`POST /v1/vector_stores/{id}/files`: answered when all chunks are on disk."""
        request = _ATTACH.decode(caller.body)
        check_attributes(request.attributes, "attributes")
        store = await self._find(caller)
        card = await self._lifecycle.models.find(store.model)
        size, overlap = chunk_sizes(request.chunking_strategy, card)
        asked = ReadFile(tenant=caller.tenant, file=request.file_id, with_data=True)
        file = await self._search.ask(asked, FileRecord)
        caller.held.add(len(file.data))
        chunks = cut_chunks(_decode_text(file), size, overlap)
        if len(chunks) > self._limits.max_inputs:
            raise InvalidRequest(
                f"The file has {len(chunks)} chunks: send at most {self._limits.max_inputs}, by a "
                "smaller file, larger chunks or less overlap.",
                param="chunking_strategy",
                code="too_many_inputs",
            )
        # A chunk may have more tokens than its characters let expect: its vector is of those that
        # fit, its text is whole.
        vectors = await self._embed(
            chunks, ["file_id"] * len(chunks), store, store.prompt, caller, truncate="end"
        )
        attributes = dict(request.attributes or {})
        attach = AttachFile(
            tenant=caller.tenant,
            store=store.id,
            file=file.id,
            digest=store.digest,
            items=[
                Item(
                    id=f"{file.id}:{number}",
                    vector=vector,
                    text=text,
                    file_id=file.id,
                    filename=file.filename,
                    attributes=attributes,
                )
                for number, (text, vector) in enumerate(zip(chunks, vectors, strict=True))
            ],
            max_chunk_tokens=size,
            chunk_overlap_tokens=overlap,
            attributes=attributes,
        )
        return StoreFileObject.of(await self._search.ask(attach, StoreFile))

    async def list_files(self, caller: Caller) -> StoreFileList:
        """`GET /v1/vector_stores/{id}/files`"""
        query = caller.read_query(ListQuery)
        store = await self._find(caller)
        asked = ListStoreFiles(tenant=caller.tenant, store=store.id, page=query.page)
        records, has_more = query.cut(await self._search.ask(asked, list[StoreFile]))
        data = [StoreFileObject.of(record) for record in records]
        return StoreFileList(data, has_more, *_ends(data))

    async def retrieve_file(self, caller: Caller) -> StoreFileObject:
        """`GET /v1/vector_stores/{id}/files/{file_id}`"""
        return StoreFileObject.of(await self._find_file(caller))

    async def _find_file(self, caller: Caller) -> StoreFile:
        asked = ReadStoreFile(
            tenant=caller.tenant,
            store=caller.path["vector_store_id"],
            file=caller.path["file_id"],
        )
        return await self._search.ask(asked, StoreFile)

    async def file_content(self, caller: Caller) -> FileContent:
        """`GET /v1/vector_stores/{id}/files/{file_id}/content`"""
        file = await self._find_file(caller)
        ids = [f"{file.id}:{number}" for number in range(file.num_chunks)]
        asked = ReadItems(tenant=caller.tenant, store=file.store_id, ids=ids)
        items = {item.id: item for item in await self._search.ask(asked, list[Item])}
        return FileContent([Content("text", items[key].text) for key in ids if key in items])

    async def detach_file(self, caller: Caller) -> Deleted:
        """`DELETE /v1/vector_stores/{id}/files/{file_id}`"""
        name = caller.path["file_id"]
        detach = DetachFile(tenant=caller.tenant, store=caller.path["vector_store_id"], file=name)
        await self._search.ask(detach, bool)
        return Deleted(name, "vector_store.file.deleted")

    # Vectors

    async def _embed(
        self,
        parts: Sequence[str | ImageSource],
        names: Sequence[str],
        store: StoreRecord,
        prompt: str,
        caller: Caller,
        truncate: Truncate = "none",
    ) -> list[bytes]:
        """A vector of the store's model for each text or image; `names`: what the wire calls them.

        Raises: ApiError.
        """
        if not parts:
            return []
        lifecycle, limits = self._lifecycle, self._limits
        num_chars = sum(len(part) for part in parts if isinstance(part, str))
        if num_chars > limits.max_input_chars and truncate == "none":
            raise InvalidRequest(
                f"The texts are too long: send at most {limits.max_input_chars} characters.",
                param=names[0].partition(".")[0],
                status=413,
                code="text_too_long",
            )
        card = await lifecycle.models.find(store.model)
        if card.digest != store.digest:
            raise InvalidRequest(
                "The model that is served under this name is not the one that made the vectors of "
                "this store: make a new store.",
                param="embedding_model",
                status=409,
                code="model_changed",
            )
        images = [part for part in parts if isinstance(part, ImageSource)]
        places = {id(image): place for place, image in enumerate(images)}
        inputs = [
            TextPart(part) if isinstance(part, str) else ImagePart(places[id(part)])
            for part in parts
        ]
        task = Embed(
            (),
            prompt_name=prompt,
            dimensions=store.dimensions if store.dimensions != card.dimensions else None,
            truncate=truncate,
        )
        per_image = card.image_tokens or TOKENS_PER_IMAGE
        tasks = [
            msgspec.structs.replace(task, inputs=tuple(some), first=first)
            for first, some in split(inputs, lambda part: _num_tokens(part, per_image), {})
        ]
        priority = (
            Priority.BATCH if len(parts) > limits.max_search_queries else Priority.INTERACTIVE
        )
        plan = Plan(tasks, msgspec.Struct(), images, shares_prompt=False, priority=priority)
        try:
            events = await lifecycle.compute(
                self._embeddings, plan, card, caller.context, caller.held
            )
        except ApiError as error:
            error.param = _rename(error.param, names)
            raise
        return [bytes(row) for row in rows_of(events)]


def _num_tokens(part: TextPart | ImagePart, per_image: int) -> int:
    return len(part.text) // CHARS_PER_TOKEN + 1 if isinstance(part, TextPart) else per_image


def _rename(param: str | None, names: Sequence[str]) -> str | None:
    """A worker says `input.[3].image`: what the client called that."""
    if param is None or not param.startswith("input.["):
        return param
    index, _, rest = param.removeprefix("input.[").partition("]")
    return names[int(index)] + rest


def _ends(data: Sequence[Any]) -> tuple[str | None, str | None]:
    return (data[0].id, data[-1].id) if data else (None, None)


def _text(param: str, value: str) -> str:
    """Raises: InvalidRequest for control characters, which no log or file should meet."""
    if any(ord(character) < 32 or 0xD800 <= ord(character) < 0xE000 for character in value):
        raise invalid(param, "send it without control characters")
    return value


def _find_prompt(param: str, asked: str | None, card: ModelCard, usual: Sequence[str]) -> str:
    """The prompt that is asked for, else the model's own of that use. Raises: InvalidRequest."""
    if asked is None:
        return next((name for name in usual if name in card.prompts), "")
    if asked and asked not in card.prompts:
        offered = ", ".join(card.prompts) or "none"
        raise invalid(param, f"the prompts of this model are: {offered}")
    return asked


def _pack(vector: Vector, param: str) -> bytes:
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
        raise invalid(param, "it is empty: send numbers")
    return array("f", vector).tobytes()


def _image(url: str, param: str) -> ImageSource:
    if not url[:8].lower().startswith(("data:", "http://", "https://")):
        url = f"data:;base64,{url}"
    return ImageSource(url, param)


def _name_image(url: str | None) -> str:
    """What is kept of an image: the URL of one that is elsewhere."""
    if url is None:
        return ""
    return url if url[:8].lower().startswith(("http://", "https://")) else "inline"


def check_attributes(attributes: Mapping[str, Any] | None, param: str) -> None:
    """Numbers are finite. Raises: InvalidRequest."""
    for key, value in (attributes or {}).items():
        _text(param, key)
        if isinstance(value, float) and not math.isfinite(value):
            raise invalid(param, "send finite numbers")


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
                raise invalid(param, f"send {part.type} with filters alone, at least one")
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
    if len(values) > MAX_FILTER_VALUES:
        raise invalid(f"{param}.value", f"send at most {MAX_FILTER_VALUES} values")
    for value in values:
        if isinstance(value, str) and len(value) > MAX_METADATA_VALUE_CHARS:
            raise invalid(
                f"{param}.value", f"send texts of at most {MAX_METADATA_VALUE_CHARS} characters"
            )
        is_number = isinstance(value, float) and not isinstance(value, bool)
        if is_number and not math.isfinite(value):  # type: ignore[arg-type]
            raise invalid(f"{param}.value", "send a finite number")
        if part.type in ("gt", "gte", "lt", "lte") and not is_number:
            raise invalid(f"{param}.value", f"{part.type} compares numbers: send one")


def _read_query(
    query: str | Sequence[str] | QueryInput,
) -> tuple[list[str], list[str | ImageSource], list[bytes]]:
    """Texts to show, what to embed, and vectors that are there already. Raises: InvalidRequest."""
    if isinstance(query, QueryInput):
        if sum(x is not None for x in (query.text, query.image, query.embedding)) != 1:
            raise invalid("query", "send one of text, image and embedding")
        if query.image is not None:
            return [], [_image(query.image, "query.image")], []
        if query.embedding is not None:
            return [], [], [_pack(query.embedding, "query.embedding")]
        query = query.text or ""
    texts = [query] if isinstance(query, str) else list(query)
    if not all(texts):
        raise invalid("query", "it is empty: send text")
    return texts, list(texts), []


def chunk_sizes(strategy: ChunkingStrategy | None, card: ModelCard) -> tuple[int, int]:
    """Tokens of a chunk, and of what it shares with the one before. Raises: InvalidRequest."""
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


def _decode_text(file: FileRecord) -> str:
    """Raises: InvalidRequest."""
    try:
        text = file.data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise InvalidRequest(
            "The file is no text in UTF-8: convert it before you upload it.",
            param="file_id",
            code="unsupported_file",
        )
    if not text.strip():
        raise invalid("file_id", "the file is empty")
    return text


def cut_chunks(text: str, num_tokens: int, overlap: int) -> list[str]:
    """Pieces of at most so many tokens of four characters, that end where a paragraph, line,
    sentence or word does, if one does in their last quarter.
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


def _content(item: Item) -> list[Content]:
    pieces = []
    if item.text:
        pieces.append(Content("text", item.text))
    if item.image:
        pieces.append(Content("image_url", image_url={"url": item.image}))
    return pieces


def _to_stored(item: Item) -> StoredItem:
    vector = base64.b64encode(item.vector).decode() if item.vector else UNSET
    return StoredItem(item.id, _content(item), item.attributes, vector)


def _to_hit(hit: Hit) -> SearchHit:
    item = hit.item
    return SearchHit(
        id=item.id,
        file_id=item.file_id or item.id,
        filename=item.filename or item.id,
        score=hit.score,
        attributes=item.attributes,
        content=_content(item),
    )
