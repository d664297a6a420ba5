"""The operations on vector stores: stores, items, files and search."""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from gateway.api.fields import invalid
from gateway.api.routes import Caller, Operation, body_of
from gateway.api.vector_stores.checks import (
    check_attributes,
    check_filter,
    check_items,
    check_metadata,
    check_search,
    check_text,
    find_prompt,
    name_of_image,
    pack_vector,
    read_query,
    to_image,
)
from gateway.api.vector_stores.chunks import chunk_sizes, cut_chunks, decode_text
from gateway.api.vector_stores.schemas import (
    AttachFileRequest,
    ChangeFileRequest,
    ChangeStoreRequest,
    Content,
    CreateStoreRequest,
    Deleted,
    DeleteItemsRequest,
    FileBatchObject,
    FileBatchRequest,
    FileContent,
    FilesQuery,
    ItemList,
    ItemQuery,
    ItemsDeleted,
    ItemsQuery,
    ItemsStored,
    ListQuery,
    PutItemsRequest,
    RankingOptions,
    SearchPage,
    SearchRequest,
    StoredItem,
    StoreFileList,
    StoreFileObject,
    StoreList,
    VectorStore,
    to_hit,
    to_stored,
)
from gateway.api.vector_stores.vectors import StoreVectors
from gateway.calls.lifecycle import Lifecycle
from gateway.http.errors import ApiError, InvalidRequest, NotFound
from gateway.images.loader import ImageSource
from gateway.search import SearchClient
from shared.protocol import ModelCard
from shared.search import (
    STORE_ID,
    AttachFile,
    ChangeStore,
    ChangeStoreFile,
    CreateStore,
    DetachFile,
    DropItems,
    DropStore,
    FileBatch,
    FileRecord,
    Hit,
    Item,
    ListStoreFiles,
    ListStores,
    Page,
    PutFileBatch,
    PutItems,
    Query,
    ReadFile,
    ReadFileBatch,
    ReadItems,
    ReadStore,
    ReadStoreFile,
    StoreFile,
    StoreRecord,
)
from shared.settings.group import MIB
from shared.settings.limits import LimitSettings

#: Hits that a model is asked to order, for each that is wanted.
_RERANK_FACTOR = 4
#: Of the items of a page: it ends before one that would be beyond, unless it is the first.
_MAX_PAGE_BYTES = 4 * MIB
_DOCUMENT_PROMPTS = ("document", "passage", "search_document")
_QUERY_PROMPTS = ("query", "search_query")
_NO_RANKERS = ("none", "auto", "default-2024-11-15")

_HINTS = {
    "type": "Comparisons are eq, ne, gt, gte, lt, lte, in and nin; and, or join filters.",
    "order": "Send asc or desc.",
}
_CREATE = body_of(CreateStoreRequest, "/v1/vector_stores")
_CHANGE = body_of(ChangeStoreRequest)
_PUT = body_of(PutItemsRequest, "/v1/vector_stores/{id}/items")
_DELETE = body_of(DeleteItemsRequest, **_HINTS)
_SEARCH = body_of(SearchRequest, **_HINTS)
_CHUNKS = "Send auto or static."
_ATTACH = body_of(AttachFileRequest, type=_CHUNKS)
_CHANGE_FILE = body_of(ChangeFileRequest)
_BATCH = body_of(FileBatchRequest, type=_CHUNKS)


class VectorStores:
    """The operations on stores, over the search process and the fleet."""

    def __init__(
        self, lifecycle: Lifecycle, search: SearchClient, limits: LimitSettings, default_store: str
    ) -> None:
        self._lifecycle = lifecycle
        self._search = search
        self._limits = limits
        self.default_store = default_store
        self._vectors = StoreVectors(lifecycle, limits)

    def operations(self) -> list[Operation]:
        stores, store = "/v1/vector_stores", "/v1/vector_stores/{vector_store_id}"
        item, file = store + "/items/{item_id:path}", store + "/files/{file_id}"
        batches, batch = store + "/file_batches", store + "/file_batches/{batch_id}"
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
                      self.list_files, StoreFileList, query=FilesQuery),
            Operation("GET", file, "retrieve_vector_store_file", "Retrieve an attached file",
                      self.retrieve_file, StoreFileObject),
            Operation("GET", file + "/content", "retrieve_vector_store_file_content",
                      "Retrieve the chunks of an attached file", self.file_content, FileContent),
            Operation("POST", file, "update_vector_store_file", "Change a file's attributes",
                      self.change_file, StoreFileObject, ChangeFileRequest),
            Operation("DELETE", file, "delete_vector_store_file", "Detach a file",
                      self.detach_file, Deleted),
            Operation("POST", batches, "create_vector_store_file_batch", "Attach files",
                      self.create_file_batch, FileBatchObject, FileBatchRequest),
            Operation("GET", batch, "retrieve_vector_store_file_batch", "Retrieve a file batch",
                      self.retrieve_file_batch, FileBatchObject),
            Operation("POST", batch + "/cancel", "cancel_vector_store_file_batch",
                      "Cancel a file batch: it has ended", self.retrieve_file_batch,
                      FileBatchObject),
            Operation("GET", batch + "/files", "list_files_in_vector_store_batch",
                      "List the files of a file batch", self.list_batch_files, StoreFileList,
                      query=FilesQuery),
        ]  # fmt: skip

    # Stores

    async def create(self, caller: Caller) -> VectorStore:
        """`POST /v1/vector_stores`"""
        request = _CREATE.decode(caller.body, caller.context)
        check_metadata(request.metadata)
        card = await self._choose_model(request.embedding_model)
        allowed = (*card.shorter_dimensions, card.dimensions)
        if request.dimensions is not None and request.dimensions not in allowed:
            raise invalid("dimensions", f"this model has {', '.join(map(str, allowed))}")
        create = CreateStore(
            tenant=caller.tenant,
            name=check_text("name", request.name or ""),
            model=card.name,
            digest=card.digest,
            dimensions=request.dimensions or card.dimensions,
            prompt=find_prompt("prompt", request.prompt, card, _DOCUMENT_PROMPTS),
            query_prompt=find_prompt("query_prompt", request.query_prompt, card, _QUERY_PROMPTS),
            metadata=request.metadata or {},
            expires_after_days=request.expires_after.days if request.expires_after else 0,
        )
        store = await self._search.ask(create, StoreRecord)
        if not request.file_ids:
            return VectorStore.of(store)
        strategy = request.chunking_strategy
        wanted = [
            AttachFileRequest(file_id=name, chunking_strategy=strategy) for name in request.file_ids
        ]
        try:
            files = await self._attach_all(wanted, store, caller)
        except BaseException:  # the client does not learn its id
            await self._search.ask(DropStore(tenant=caller.tenant, store=store.id), bool)
            raise
        made = VectorStore.of(await self._find(caller, store.id))
        made.file_counts.failed = sum(file.status == "failed" for file in files)
        made.file_counts.total = len(files)
        return made

    async def _choose_model(self, name: str | None) -> ModelCard:
        """The card of a model that makes vectors. Raises: ApiError, QueueUnavailable, RedisError."""
        models = self._lifecycle.models
        if name is None:
            cards = [card for card in models.served() if "embed" in card.tasks]
            served = [card for card in cards if models.num_workers[card.queue]]
            cards = served or cards  # one that ran yesterday is no choice
            if len(cards) == 1:
                return cards[0]
            names = ", ".join(sorted(card.name for card in cards)) or "none"
            raise invalid("embedding_model", f"name one of those that make vectors: {names}")
        try:
            card = await models.find(name, task="embed")
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
        request = _CHANGE.decode(caller.body, caller.context)
        check_metadata(request.metadata)
        change = ChangeStore(
            tenant=caller.tenant,
            store=caller.path["vector_store_id"],
            name=None if request.name is None else check_text("name", request.name),
            metadata=request.metadata,
            expires_after_days=None
            if request.expires_after is UNSET
            else request.expires_after.days
            if request.expires_after
            else 0,
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
        request = _PUT.decode(caller.body, caller.context)
        items = request.items
        check_items(items, self._limits)
        images = [
            name_of_image(item.image, f"items.[{index}].image") for index, item in enumerate(items)
        ]
        store = await self._find(caller)
        vectors: dict[int, bytes] = {}
        parts: dict[int, str | ImageSource] = {}
        for index, item in enumerate(items):
            if item.embedding is not None:
                vectors[index] = pack_vector(item.embedding, f"items.[{index}].embedding")
            elif item.image is not None:
                parts[index] = to_image(item.image, f"items.[{index}].image")
            else:
                parts[index] = item.text or ""
        names = [
            f"items.[{index}]" + ("" if isinstance(part, ImageSource) else ".text")
            for index, part in parts.items()
        ]
        made = await self._vectors.embed(list(parts.values()), names, store, store.prompt, caller)
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
                    image=images[index],
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
        data, num_bytes = [], 0
        for item in items[: query.limit]:
            stored = to_stored(item)
            num_bytes += len(msgspec.json.encode(stored))
            if data and num_bytes > _MAX_PAGE_BYTES:
                break
            data.append(stored)
        return ItemList(data, len(items) > len(data), *_ends(data))

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
        return to_stored(items[0])

    async def delete_items(self, caller: Caller) -> ItemsDeleted:
        """`DELETE /v1/vector_stores/{id}/items`"""
        request = _DELETE.decode(caller.body, caller.context)
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
        request = _SEARCH.decode(caller.body, caller.context)
        check_search(request, self._limits)
        store = await self._find(caller)
        texts, parts, vectors = read_query(request.query)
        many = isinstance(request.query, list)
        names = [f"query.[{index}]" if many else "query" for index in range(len(parts))]
        made = await self._vectors.embed(parts, names, store, store.query_prompt, caller)
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
            hits = (await self._vectors.rerank(ranker, texts, hits, caller))[:wanted]
        least = options.score_threshold
        kept = [hit for hit in hits if least is None or hit.score >= least]
        return SearchPage(texts, [to_hit(hit) for hit in kept])

    async def find(self, caller: Caller, text: str, num_results: int) -> list[Hit]:
        """The nearest items of the default store."""
        if not self.default_store:
            raise NotFound(
                "There is no default store: set VLM_SEARCH__DEFAULT_STORE at the gateway.",
                code="search_not_served",
            )
        store = await self._find(caller, self.default_store)
        made = await self._vectors.embed([text], ["text"], store, store.query_prompt, caller)
        query = Query(
            tenant=caller.tenant, store=store.id, digest=store.digest, vectors=made, k=num_results
        )
        return await self._search.ask(query, list[Hit])

    # Files

    async def attach_file(self, caller: Caller) -> StoreFileObject:
        """`POST /v1/vector_stores/{id}/files`: answered when all chunks are on disk."""
        request = _ATTACH.decode(caller.body, caller.context)
        check_attributes(request.attributes, "attributes")
        store = await self._find(caller)
        return StoreFileObject.of(await self._attach(request, store, caller))

    async def _attach(
        self, request: AttachFileRequest, store: StoreRecord, caller: Caller
    ) -> StoreFile:
        """Raises: ApiError, QueueUnavailable."""
        card = await self._lifecycle.models.find(store.model)
        size, overlap = chunk_sizes(request.chunking_strategy, card)
        asked = ReadFile(tenant=caller.tenant, file=request.file_id, with_data=True)
        file = await self._search.ask(asked, FileRecord)
        caller.held.add(len(file.data))
        chunks = cut_chunks(decode_text(file), size, overlap)
        if len(chunks) > self._limits.max_inputs:
            raise InvalidRequest(
                f"The file has {len(chunks)} chunks: send at most {self._limits.max_inputs}, by a "
                "smaller file, larger chunks or less overlap.",
                param="chunking_strategy",
                code="too_many_inputs",
            )
        # A chunk may have more tokens than its characters let expect: its vector is of those that
        # fit, its text is whole.
        vectors = await self._vectors.embed(
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
        return await self._search.ask(attach, StoreFile)

    async def _attach_all(
        self, requests: Sequence[AttachFileRequest], store: StoreRecord, caller: Caller
    ) -> list[StoreFile]:
        """One after another; a file that cannot be attached does not stop the others.

        Raises: ApiError where the fleet or the search process is away, QueueUnavailable.
        """
        files = []
        for request in requests:
            try:
                files.append(await self._attach(request, store, caller))
            except ApiError as error:
                if error.status >= 500 or error.status == 429:
                    raise
                failed = StoreFile(
                    id=request.file_id, store_id=store.id, filename="", status="failed",
                    created_at=int(time.time()),  # noqa: TID251
                    num_chunks=0, num_bytes=0, max_chunk_tokens=0, chunk_overlap_tokens=0,
                    attributes=dict(request.attributes or {}),
                    error_code="unsupported_file" if error.code == "unsupported_file" else "invalid_file",
                    error=error.message,
                )  # fmt: skip
                files.append(failed)
        return files

    async def change_file(self, caller: Caller) -> StoreFileObject:
        """`POST /v1/vector_stores/{id}/files/{file_id}`"""
        request = _CHANGE_FILE.decode(caller.body, caller.context)
        check_attributes(request.attributes, "attributes")
        change = ChangeStoreFile(
            tenant=caller.tenant,
            store=caller.path["vector_store_id"],
            file=caller.path["file_id"],
            attributes=dict(request.attributes or {}),
        )
        return StoreFileObject.of(await self._search.ask(change, StoreFile))

    async def create_file_batch(self, caller: Caller) -> FileBatchObject:
        """`POST /v1/vector_stores/{id}/file_batches`: answered when all files are attached."""
        request = _BATCH.decode(caller.body, caller.context)
        if (request.file_ids is None) == (request.files is None):
            raise invalid("file_ids", "send either file_ids or files")
        if request.files is not None and (request.attributes or request.chunking_strategy):
            raise invalid("files", "each of files has its own attributes and chunking_strategy")
        check_attributes(request.attributes, "attributes")
        files = request.files or [
            AttachFileRequest(
                file_id=name,
                attributes=request.attributes,
                chunking_strategy=request.chunking_strategy,
            )
            for name in request.file_ids or ()
        ]
        for index, file in enumerate(files):
            check_attributes(file.attributes, f"files.[{index}].attributes")
        store = await self._find(caller)
        attached = await self._attach_all(files, store, caller)
        put = PutFileBatch(tenant=caller.tenant, store=store.id, files=attached)
        return FileBatchObject.of(await self._search.ask(put, FileBatch))

    async def retrieve_file_batch(self, caller: Caller) -> FileBatchObject:
        """`GET /v1/vector_stores/{id}/file_batches/{batch_id}`, and `POST .../cancel`"""
        return FileBatchObject.of(await self._find_batch(caller))

    async def _find_batch(self, caller: Caller) -> FileBatch:
        asked = ReadFileBatch(
            tenant=caller.tenant,
            store=caller.path["vector_store_id"],
            batch=caller.path["batch_id"],
        )
        return await self._search.ask(asked, FileBatch)

    async def list_batch_files(self, caller: Caller) -> StoreFileList:
        """`GET /v1/vector_stores/{id}/file_batches/{batch_id}/files`"""
        query = caller.read_query(FilesQuery)
        files, has_more = query.choose((await self._find_batch(caller)).files)
        data = [StoreFileObject.of(file) for file in files]
        return StoreFileList(data, has_more, *_ends(data))

    async def list_files(self, caller: Caller) -> StoreFileList:
        """`GET /v1/vector_stores/{id}/files`: all are completed."""
        query = caller.read_query(FilesQuery)
        store = await self._find(caller)
        if query.filter not in ("", "completed"):
            return StoreFileList([], False, None, None)
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


def _ends(data: Sequence[Any]) -> tuple[str | None, str | None]:
    return (data[0].id, data[-1].id) if data else (None, None)
