"""`POST /similar`: the nearest items of the default store, as lines of text."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.api.fields import RequestStruct, invalid
from gateway.api.vector_stores import VectorStores
from gateway.http.endpoint import Caller, Resource, operation
from shared.settings.limits import MAX_SEARCH_RESULTS


class SimilarRequest(RequestStruct, frozen=True, kw_only=True):
    text: str | None = None
    keywords: str | list[str] | None = None
    num_results: Annotated[int, Meta(ge=1, le=MAX_SEARCH_RESULTS)] = 10


class SimilarAnswer(msgspec.Struct):
    """One line per item, nearest first."""

    text: list[str]


class Similar(Resource):
    tag = "vector stores"

    def __init__(self, stores: VectorStores) -> None:
        self._stores = stores

    @operation("POST", "/similar")
    async def similar(self, caller: Caller, body: SimilarRequest) -> SimilarAnswer:
        """Find the nearest items of the default store."""
        words = body.keywords
        text = body.text or (words if isinstance(words, str) else " ".join(words or ()))
        if (body.text is None) == (words is None) or not text:
            raise invalid("text", "send either text or keywords")
        hits = await self._stores.find(caller, text, body.num_results)
        return SimilarAnswer(
            [
                f"Item: {hit.item.text or hit.item.image} (index: {hit.item.id} score:{hit.score:.2f})"
                for hit in hits
            ]
        )
