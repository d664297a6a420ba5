"""The operations on vector stores: stores, items, files and search."""

import time
from collections.abc import Sequence

import msgspec
from msgspec import UNSET

import shared.search as wire
from gateway.api.embeddings import (
    Embeddings,
    check_dimensions,
    rows_of,
    split_documents,
    split_inputs,
)
from gateway.api.fields import UNSUPPORTED, check_chars, check_num, invalid
from gateway.api.rerank import Reranking, scores_of
from gateway.api.vector_stores import schemas
from gateway.calls.lifecycle import Lifecycle
from gateway.calls.surface import NoOptions, Plan
from gateway.http.endpoint import Caller, Resource, operation
from gateway.http.errors import ApiError, InvalidRequest, NotFound, conflict
from gateway.media.loader import ImageSource
from gateway.search import SearchClient
from shared.protocol import Embed, ImagePart, ModelCard, Priority, Rerank, TextPart, Truncate
from shared.settings.limits import MIB

#: Number of hits that a reranker gets, per requested hit.
_RERANK_FACTOR = 4
#: Size limit of a page of items; the first item is always included.
_MAX_PAGE_BYTES = 4 * MIB
_DOCUMENT_PROMPTS = ("document", "passage", "search_document")
_QUERY_PROMPTS = ("query", "search_query")
_NO_RANKERS = ("none", "auto", "default-2024-11-15")

_HINTS = {
    "type": "Comparisons are eq, ne, gt, gte, lt, lte, in and nin; and, or join filters.",
    "order": "Send asc or desc.",
}
_CHUNKS = {"type": "Send auto or static."}


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
    async def create_vector_store(
        self, caller: Caller, body: schemas.CreateStoreRequest
    ) -> schemas.VectorStore:
        """Create a vector store."""
        schemas.check_metadata(body.metadata)
        card = await self._choose_model(body.embedding_model, caller.context.tenant)
        check_dimensions(body.dimensions, card)
        create = wire.CreateStore(
            tenant=caller.tenant,
            name=schemas.check_text("name", body.name or ""),
            model=card.name,
            digest=card.digest,
            dimensions=body.dimensions or card.dimensions,
            prompt=schemas.find_prompt("prompt", body.prompt, card, _DOCUMENT_PROMPTS),
            query_prompt=schemas.find_prompt(
                "query_prompt", body.query_prompt, card, _QUERY_PROMPTS
            ),
            metadata=body.metadata or {},
            expires_after_days=body.expires_after.days if body.expires_after else 0,
        )
        store = await self._search.ask(create)
        if not body.file_ids:
            return schemas.VectorStore.of(store)
        strategy = body.chunking_strategy
        wanted = [
            schemas.AttachFileRequest(file_id=name, chunking_strategy=strategy)
            for name in body.file_ids
        ]
        try:
            files = await self._attach_all(wanted, store, caller)
        except BaseException:  # the client does not get the store's id
            await self._search.ask(wire.DropStore(tenant=caller.tenant, store=store.id))
            raise
        made = schemas.VectorStore.of(await self._find(caller, store.id))
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
            raise InvalidRequest(
                f"This model makes no embeddings; it supports: {offered}.",
                param="embedding_model",
                code="wrong_task",
            )
        return card

    @operation("GET", _STORES)
    async def list_vector_stores(
        self, caller: Caller, query: schemas.ListQuery
    ) -> schemas.StoreList:
        """List vector stores."""
        asked = wire.ListStores(tenant=caller.tenant, page=query.page)
        records, has_more = query.cut(await self._search.ask(asked))
        data = [schemas.VectorStore.of(record) for record in records]
        return schemas.StoreList.of(data, has_more)

    @operation("GET", _STORE)
    async def retrieve_vector_store(self, caller: Caller) -> schemas.VectorStore:
        """Retrieve a vector store."""
        return schemas.VectorStore.of(await self._find(caller))

    async def _find(self, caller: Caller, name: str | None = None) -> wire.StoreRecord:
        if name is None:
            name = caller.path["vector_store_id"]
            if not name.startswith(wire.STORE_ID):  # names are set by the operator
                raise NotFound(
                    "There is no such vector store.", param="vector_store_id", code="not_found"
                )
        asked = wire.ReadStore(tenant=caller.tenant, store=name)
        return await self._search.ask(asked)

    @operation("POST", _STORE)
    async def modify_vector_store(
        self, caller: Caller, body: schemas.ChangeStoreRequest
    ) -> schemas.VectorStore:
        """Modify a vector store."""
        schemas.check_metadata(body.metadata)
        days = body.expires_after.days if body.expires_after else 0
        change = wire.ChangeStore(
            tenant=caller.tenant,
            store=caller.path["vector_store_id"],
            name=None if body.name is None else schemas.check_text("name", body.name),
            metadata=body.metadata,
            expires_after_days=None if body.expires_after is UNSET else days,
        )
        return schemas.VectorStore.of(await self._search.ask(change))

    @operation("DELETE", _STORE)
    async def delete_vector_store(self, caller: Caller) -> schemas.Deleted:
        """Delete a vector store."""
        name = caller.path["vector_store_id"]
        await self._search.ask(wire.DropStore(tenant=caller.tenant, store=name))
        return schemas.Deleted(name, "vector_store.deleted")

    # Items

    @operation("PUT", _ITEMS, unsupported=UNSUPPORTED["/v1/vector_stores/{id}/items"])
    async def put_items(self, caller: Caller, body: schemas.PutItemsRequest) -> schemas.ItemsStored:
        """Insert or replace items."""
        items = body.items
        schemas.check_items(items, self._limits)
        images = [
            schemas.name_of_image(item.image, f"items.[{index}].image")
            for index, item in enumerate(items)
        ]
        store = await self._find(caller)
        vectors: dict[int, bytes] = {}
        parts: dict[int, str | ImageSource] = {}
        for index, item in enumerate(items):
            if item.embedding is not None:
                vectors[index] = schemas.pack_vector(item.embedding, f"items.[{index}].embedding")
            elif item.image is not None:
                parts[index] = schemas.to_image(item.image, f"items.[{index}].image")
            else:
                parts[index] = item.text or ""
        names = [
            f"items.[{index}]" + ("" if isinstance(part, ImageSource) else ".text")
            for index, part in parts.items()
        ]
        made = await self._embed(list(parts.values()), names, store, store.prompt, caller)
        vectors |= dict(zip(parts, made, strict=True))
        put = wire.PutItems(
            tenant=caller.tenant,
            store=store.id,
            digest=store.digest if parts else "",
            items=[
                wire.Item(
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
            lambda index: f"items.[{index}].embedding" if index.isdigit() else index,
        )
        return schemas.ItemsStored(len(items), schemas.VectorStore.of(record))

    @operation("GET", _ITEMS)
    async def list_items(self, caller: Caller, query: schemas.ItemsQuery) -> schemas.ItemList:
        """List items."""
        store = await self._find(caller)
        asked = wire.ReadItems(
            tenant=caller.tenant,
            store=store.id,
            page=wire.Page(limit=query.limit, after=query.after),
            with_vectors=query.include == "embedding",
        )
        items = await self._search.ask(asked)
        data, num_bytes = [], 0
        for item in items[: query.limit]:
            stored = schemas.to_stored(item)
            num_bytes += len(msgspec.json.encode(stored))
            if data and num_bytes > _MAX_PAGE_BYTES:
                break
            data.append(stored)
        return schemas.ItemList.of(data, len(items) > len(data))

    @operation("GET", _ITEMS + "/{item_id:path}")
    async def retrieve_item(self, caller: Caller, query: schemas.ItemQuery) -> schemas.StoredItem:
        """Retrieve an item."""
        store = await self._find(caller)
        asked = wire.ReadItems(
            tenant=caller.tenant,
            store=store.id,
            ids=[caller.path["item_id"]],
            with_vectors=query.include == "embedding",
        )
        items = await self._search.ask(asked)
        if not items:
            raise NotFound("There is no such item.", param="item_id", code="not_found")
        return schemas.to_stored(items[0])

    @operation("DELETE", _ITEMS, hints=_HINTS)
    async def delete_items(
        self, caller: Caller, body: schemas.DeleteItemsRequest
    ) -> schemas.ItemsDeleted:
        """Delete items by ids or filter."""
        if (body.ids is None) == (body.filters is None):
            raise invalid("ids", "send either ids or filters")
        check_num("ids", len(body.ids or ()), self._limits.max_inputs, "ids")
        if body.filters is not None:
            schemas.check_filter(body.filters, self._limits)
        store = await self._find(caller)
        drop = wire.DropItems(
            tenant=caller.tenant,
            store=store.id,
            ids=None if body.ids is None else list(dict.fromkeys(body.ids)),
            where=body.filters,
        )
        return schemas.ItemsDeleted(await self._search.ask(drop))

    # Search

    @operation("POST", _STORE + "/search", hints=_HINTS)
    async def search_vector_store(
        self, caller: Caller, body: schemas.SearchRequest
    ) -> schemas.SearchPage:
        """Search a vector store."""
        schemas.check_search(body, self._limits)
        store = await self._find(caller)
        texts, parts, vectors = schemas.read_query(body.query)
        many = isinstance(body.query, list)
        names = [f"query.[{index}]" if many else "query" for index in range(len(parts))]
        made = await self._embed(parts, names, store, store.query_prompt, caller)
        options = body.ranking_options or schemas.RankingOptions()
        wanted = body.max_num_results or 10
        ranker = None if options.ranker in (None, *_NO_RANKERS) else options.ranker
        if ranker and not texts:
            raise invalid("ranking_options.ranker", "a ranker requires a text query")
        query = wire.Query(
            tenant=caller.tenant,
            store=store.id,
            digest=store.digest if parts else "",
            vectors=[*made, *vectors],
            k=wanted * _RERANK_FACTOR if ranker else wanted,
            where=body.filters,
        )
        name = "query.embedding" if vectors else "query"
        hits = await self._search.ask(query, lambda p: name if p.isdigit() else p)
        if ranker:
            hits = (await self._rerank(ranker, texts, hits, caller))[:wanted]
        least = options.score_threshold
        kept = [hit for hit in hits if least is None or hit.score >= least]
        return schemas.SearchPage(texts, [schemas.to_hit(hit) for hit in kept])

    @operation("POST", "/similar")
    async def similar(self, caller: Caller, body: schemas.SimilarRequest) -> schemas.SimilarAnswer:
        """Find the nearest items of the default store."""
        words = body.keywords
        text = body.text or (words if isinstance(words, str) else " ".join(words or ()))
        if (body.text is None) == (words is None) or not text:
            raise invalid("text", "send either text or keywords")
        if not self._default_store:
            raise NotFound(
                "There is no default store: set VLM_SEARCH__DEFAULT_STORE at the gateway.",
                code="search_not_served",
            )
        store = await self._find(caller, self._default_store)
        made = await self._embed([text], ["text"], store, store.query_prompt, caller)
        query = wire.Query(
            tenant=caller.tenant,
            store=store.id,
            digest=store.digest,
            vectors=made,
            k=body.num_results,
        )
        hits = await self._search.ask(query)
        shown = ((h.item.text or h.item.image, h.item.id, h.score) for h in hits)
        return schemas.SimilarAnswer(
            [f"Item: {t} (index: {i} score:{score:.2f})" for t, i, score in shown]
        )

    # Files

    @operation("POST", _FILES, hints=_CHUNKS)
    async def create_vector_store_file(
        self, caller: Caller, body: schemas.AttachFileRequest
    ) -> schemas.StoreFileObject:
        """Attach a file. Returns when all chunks are on disk."""
        schemas.check_attributes(body.attributes, "attributes")
        store = await self._find(caller)
        return schemas.StoreFileObject.of(await self._attach(body, store, caller))

    async def _attach(
        self, request: schemas.AttachFileRequest, store: wire.StoreRecord, caller: Caller
    ) -> wire.StoreFile:
        """Raises: ApiError, QueueUnavailable."""
        card = await self._lifecycle.models.find(store.model, tenant=caller.context.tenant)
        size, overlap = schemas.chunk_sizes(request.chunking_strategy, card)
        asked = wire.ReadFile(tenant=caller.tenant, file=request.file_id, with_data=True)
        file = await self._search.ask(asked)
        caller.held.add(len(file.data))
        chunks = schemas.cut_chunks(schemas.decode_text(file), size, overlap)
        if len(chunks) > self._limits.max_inputs:
            raise InvalidRequest(
                f"The file has {len(chunks)} chunks, at most {self._limits.max_inputs} are allowed: send a "
                "smaller file, larger chunks or less overlap.",
                param="chunking_strategy",
                code="too_many_inputs",
            )
        # If a chunk has more tokens than estimated, only the first ones are embedded. Its text is complete.
        vectors = await self._embed(
            chunks, ["file_id"] * len(chunks), store, store.prompt, caller, truncate="end"
        )
        attributes = dict(request.attributes or {})
        attach = wire.AttachFile(
            tenant=caller.tenant,
            store=store.id,
            file=file.id,
            digest=store.digest,
            items=[
                wire.Item(
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
        return await self._search.ask(attach)

    async def _attach_all(
        self, requests: Sequence[schemas.AttachFileRequest], store: wire.StoreRecord, caller: Caller
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
        self, caller: Caller, body: schemas.ChangeFileRequest
    ) -> schemas.StoreFileObject:
        """Change a file's attributes."""
        schemas.check_attributes(body.attributes, "attributes")
        change = wire.ChangeStoreFile(
            tenant=caller.tenant,
            store=caller.path["vector_store_id"],
            file=caller.path["file_id"],
            attributes=dict(body.attributes or {}),
        )
        return schemas.StoreFileObject.of(await self._search.ask(change))

    @operation("POST", _BATCHES, hints=_CHUNKS)
    async def create_vector_store_file_batch(
        self, caller: Caller, body: schemas.FileBatchRequest
    ) -> schemas.FileBatchObject:
        """Attach files. Returns when all are attached."""
        if (body.file_ids is None) == (body.files is None):
            raise invalid("file_ids", "send either file_ids or files")
        if body.files is not None and (body.attributes or body.chunking_strategy):
            raise invalid("files", "send attributes and chunking_strategy in each of files")
        schemas.check_attributes(body.attributes, "attributes")
        files = body.files or [
            schemas.AttachFileRequest(
                file_id=name,
                attributes=body.attributes,
                chunking_strategy=body.chunking_strategy,
            )
            for name in body.file_ids or ()
        ]
        for index, file in enumerate(files):
            schemas.check_attributes(file.attributes, f"files.[{index}].attributes")
        store = await self._find(caller)
        attached = await self._attach_all(files, store, caller)
        put = wire.PutFileBatch(tenant=caller.tenant, store=store.id, files=attached)
        return schemas.FileBatchObject.of(await self._search.ask(put))

    @operation("GET", _BATCH)
    async def retrieve_vector_store_file_batch(self, caller: Caller) -> schemas.FileBatchObject:
        """Retrieve a file batch."""
        return schemas.FileBatchObject.of(await self._find_batch(caller))

    @operation("POST", _BATCH + "/cancel")
    async def cancel_vector_store_file_batch(self, caller: Caller) -> schemas.FileBatchObject:
        """Cancel a file batch. Has no effect, as file batches have ended when they are created."""
        return schemas.FileBatchObject.of(await self._find_batch(caller))

    async def _find_batch(self, caller: Caller) -> wire.FileBatch:
        asked = wire.ReadFileBatch(
            tenant=caller.tenant,
            store=caller.path["vector_store_id"],
            batch=caller.path["batch_id"],
        )
        return await self._search.ask(asked)

    @operation("GET", _BATCH + "/files")
    async def list_files_in_vector_store_batch(
        self, caller: Caller, query: schemas.FilesQuery
    ) -> schemas.StoreFileList:
        """List the files of a file batch."""
        files, has_more = query.choose((await self._find_batch(caller)).files)
        data = [schemas.StoreFileObject.of(file) for file in files]
        return schemas.StoreFileList.of(data, has_more)

    @operation("GET", _FILES)
    async def list_vector_store_files(
        self, caller: Caller, query: schemas.FilesQuery
    ) -> schemas.StoreFileList:
        """List attached files; all are completed."""
        store = await self._find(caller)
        if query.filter not in ("", "completed"):
            return schemas.StoreFileList.of([], False)
        asked = wire.ListStoreFiles(tenant=caller.tenant, store=store.id, page=query.page)
        records, has_more = query.cut(await self._search.ask(asked))
        data = [schemas.StoreFileObject.of(record) for record in records]
        return schemas.StoreFileList.of(data, has_more)

    @operation("GET", _FILE)
    async def retrieve_vector_store_file(self, caller: Caller) -> schemas.StoreFileObject:
        """Retrieve an attached file."""
        return schemas.StoreFileObject.of(await self._find_file(caller))

    async def _find_file(self, caller: Caller) -> wire.StoreFile:
        asked = wire.ReadStoreFile(
            tenant=caller.tenant,
            store=caller.path["vector_store_id"],
            file=caller.path["file_id"],
        )
        return await self._search.ask(asked)

    @operation("GET", _FILE + "/content")
    async def retrieve_vector_store_file_content(self, caller: Caller) -> schemas.FileContent:
        """Retrieve the chunks of an attached file."""
        file = await self._find_file(caller)
        ids = [f"{file.id}:{number}" for number in range(file.num_chunks)]
        asked = wire.ReadItems(tenant=caller.tenant, store=file.store_id, ids=ids)
        items = {item.id: item for item in await self._search.ask(asked)}
        return schemas.FileContent(
            [schemas.Content("text", items[key].text) for key in ids if key in items]
        )

    @operation("DELETE", _FILE)
    async def delete_vector_store_file(self, caller: Caller) -> schemas.Deleted:
        """Detach a file."""
        name = caller.path["file_id"]
        detach = wire.DetachFile(
            tenant=caller.tenant, store=caller.path["vector_store_id"], file=name
        )
        await self._search.ask(detach)
        return schemas.Deleted(name, "vector_store.file.deleted")

    # Vectors and scores, by calls to workers

    async def _embed(
        self,
        parts: Sequence[str | ImageSource],
        names: Sequence[str],
        store: wire.StoreRecord,
        prompt: str,
        caller: Caller,
        truncate: Truncate = "none",
    ) -> list[bytes]:
        """Embed texts and images with the store's model. `names`: field names of the inputs, for errors.

        Raises: ApiError.
        """
        if not parts:
            return []
        if truncate == "none":
            num_chars = sum(len(part) for part in parts if isinstance(part, str))
            check_chars(num_chars, self._limits.max_input_chars, names[0].partition(".")[0])
        card = await self._lifecycle.models.find(store.model, tenant=caller.context.tenant)
        if card.digest != store.digest:
            raise conflict(
                "The served model of this name is not the one that embedded the items of this "
                "store: create a new store.",
                code="model_changed",
                param="embedding_model",
            )
        dimensions = store.dimensions if store.dimensions != card.dimensions else None
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
    """The client's field name for a worker's, such as `input.[3].image`."""
    if param is None or not param.startswith("input.["):
        return param
    index, _, rest = param.removeprefix("input.[").partition("]")
    return names[int(index)] + rest
