"""`POST /similar`: the nearest items of the default store, as lines of text."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gateway.api.fields import RequestStruct, invalid
from gateway.api.routes import Caller, Operation, body_of
from gateway.api.vector_stores import VectorStores
from shared.settings.limits import MAX_SEARCH_RESULTS


class SimilarRequest(RequestStruct, frozen=True, kw_only=True):
    """Either a text, or keywords."""

    text: str | None = None
    keywords: str | list[str] | None = None
    num_results: Annotated[int, Meta(ge=1, le=MAX_SEARCH_RESULTS)] = 10


class SimilarAnswer(msgspec.Struct):
    """A line for each item, the nearest first."""

    text: list[str]


_BODY = body_of(SimilarRequest)


class Similar:
    """One operation."""

    def __init__(self, stores: VectorStores) -> None:
        self._stores = stores

    def operations(self) -> list[Operation]:
        return [
            Operation("POST", "/similar", "similar", "The nearest items of the default store",
                      self.find, SimilarAnswer, SimilarRequest),
        ]  # fmt: skip

    async def find(self, caller: Caller) -> SimilarAnswer:
        """`POST /similar`"""
        request = _BODY.decode(caller.body, caller.context)
        words = request.keywords
        text = request.text or (words if isinstance(words, str) else " ".join(words or ()))
        if (request.text is None) == (words is None) or not text:
            raise invalid("text", "send either text or keywords")
        hits = await self._stores.find(caller, text, request.num_results)
        return SimilarAnswer(
            [
                f"Item: {hit.item.text or hit.item.image} (index: {hit.item.id} score:{hit.score:.2f})"
                for hit in hits
            ]
        )
