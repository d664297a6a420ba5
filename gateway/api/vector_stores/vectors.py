"""Computes embeddings and scores for vector stores, by calls to workers."""

from collections.abc import Sequence

import msgspec

from gateway.api.embeddings import Embeddings, rows_of
from gateway.api.fields import check_chars
from gateway.api.inputs import split_documents, split_inputs
from gateway.api.rerank import Reranking, scores_of
from gateway.calls.lifecycle import Lifecycle
from gateway.calls.surface import Plan
from gateway.http.endpoint import Caller
from gateway.http.errors import ApiError, InvalidRequest, NotFound, conflict
from gateway.media.loader import ImageSource
from shared.protocol import Embed, ImagePart, ModelCard, Priority, Rerank, TextPart, Truncate
from shared.search import Hit, StoreRecord
from shared.settings.limits import LimitSettings


class StoreVectors:
    def __init__(self, lifecycle: Lifecycle, limits: LimitSettings) -> None:
        self._lifecycle = lifecycle
        self._limits = limits
        self._embeddings = Embeddings(limits)
        self._reranking = Reranking(limits)

    async def embed(
        self,
        parts: Sequence[str | ImageSource],
        names: Sequence[str],
        store: StoreRecord,
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
        card = await self._find_card(store, caller.context.tenant)
        dimensions = store.dimensions if store.dimensions != card.dimensions else None
        task = Embed((), prompt_name=prompt, dimensions=dimensions, truncate=truncate)
        plan = self._plan(task, parts, card)
        try:
            events = await self._lifecycle.compute(
                self._embeddings, plan, card, caller.context, caller.held
            )
        except ApiError as error:
            error.param = _rename(error.param, names)
            raise
        return [bytes(row) for row in rows_of(events)]

    async def _find_card(self, store: StoreRecord, tenant: str) -> ModelCard:
        """The card of the model of the store's vectors. Raises: ApiError."""
        card = await self._lifecycle.models.find(store.model, tenant=tenant)
        if card.digest != store.digest:
            raise conflict(
                "The served model of this name is not the one that embedded the items of this "
                "store: create a new store.",
                code="model_changed",
                param="embedding_model",
            )
        return card

    def _plan(self, task: Embed, parts: Sequence[str | ImageSource], card: ModelCard) -> Plan:
        """Split the inputs into calls."""
        images = [part for part in parts if isinstance(part, ImageSource)]
        places = {id(image): place for place, image in enumerate(images)}
        inputs = [
            TextPart(part) if isinstance(part, str) else ImagePart(places[id(part)])
            for part in parts
        ]
        tasks = split_inputs(task, inputs, card, {})
        is_large = len(parts) > self._limits.max_search_queries
        priority = Priority.BATCH if is_large else Priority.INTERACTIVE
        return Plan(tasks, msgspec.Struct(), images, num_prompts=len(tasks), priority=priority)

    async def rerank(
        self, model: str, texts: Sequence[str], hits: Sequence[Hit], caller: Caller
    ) -> list[Hit]:
        """Sort hits by a reranker's scores for the first query text. Hits without text come last."""
        try:
            card = await self._lifecycle.models.find(
                model, task="rerank", tenant=caller.context.tenant
            )
        except NotFound as error:
            param = "ranking_options.ranker"
            raise NotFound(error.message, param=param, code=error.code) from None
        scored = [hit for hit in hits if hit.item.text]
        if not scored:
            return list(hits)
        documents = [hit.item.text for hit in scored]
        tasks = split_documents(Rerank((texts[0],), (), truncate="end"), documents, {})
        plan = Plan(tasks, msgspec.Struct(), num_prompts=len(tasks))
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


def _rename(param: str | None, names: Sequence[str]) -> str | None:
    """The client's field name for a worker's, such as `input.[3].image`."""
    if param is None or not param.startswith("input.["):
        return param
    index, _, rest = param.removeprefix("input.[").partition("]")
    return names[int(index)] + rest
