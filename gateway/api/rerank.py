"""`POST /v1/rerank` (documents by relevance to a query) and `POST /v1/score` (pairs of texts).

The common part of Cohere's, Jina's and vLLM's rerank APIs, and vLLM's score API.

Source: Cohere and Jina API references, "Rerank"; vLLM, "Score API".
"""

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.api.answers import WholeAnswer
from gateway.api.embeddings import InputFields, InputUsage, split_documents, to_plan, to_truncate
from gateway.api.fields import RequestStruct, check_chars, check_num, doc, invalid, timings_of
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, NoOptions, Plan, Surface, Totals
from gateway.http.exchange import RequestContext
from shared.protocol import ModelCard, Rerank, Scores


class TextDocument(RequestStruct, frozen=True, kw_only=True):
    text: str


Document = str | TextDocument
Documents = Annotated[list[Document], Meta(min_length=1)]


class RerankRequest(InputFields, frozen=True, kw_only=True):
    query: str
    documents: Documents
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[
        Annotated[int, Meta(ge=1)] | None, doc("Documents are truncated to this number of tokens.")
    ] = None
    raw_scores: Annotated[bool | None, doc("Return the model's scores as they are.")] = None


class ScoreRequest(InputFields, frozen=True, kw_only=True):
    """The body of `POST /v1/score`: one text and one or many others, or two lists of equal length."""

    text_1: str | Annotated[list[str], Meta(min_length=1)]
    text_2: str | Annotated[list[str], Meta(min_length=1)]


class ReturnedDocument(msgspec.Struct):
    text: str


class RerankResult(msgspec.Struct):
    """A document's score. `index` is its index in the request."""

    index: int
    relevance_score: float
    document: ReturnedDocument | UnsetType = UNSET


class RerankAnswer(msgspec.Struct):
    """Most relevant documents first; ties in the order of the request."""

    id: str
    model: str
    results: list[RerankResult]
    usage: InputUsage
    meta: dict[str, str]
    timings: dict[str, float] | UnsetType = UNSET


class PairScore(msgspec.Struct):
    index: int
    score: float
    object: str = "score"


class ScoreAnswer(msgspec.Struct):
    """The scores in the order of the pairs."""

    id: str
    created: int
    model: str
    data: list[PairScore]
    usage: InputUsage
    object: str = "list"
    timings: dict[str, float] | UnsetType = UNSET


class RerankOptions(msgspec.Struct, frozen=True):
    """Options of the answer. `documents`: texts to return; empty: none."""

    top_n: int | None = None
    documents: tuple[str, ...] = ()


class _Pairs(Surface):
    tag = "embeddings"
    task = "rerank"
    commas = "max_input_commas"
    hints: ClassVar = {"truncate": "Send true, false, NONE, START or END."}

    def _tasks(
        self, task: Rerank, documents: Sequence[str], context: RequestContext
    ) -> list[Rerank]:
        """Split the documents into tasks, each with the query. Raises: InvalidRequest."""
        limits = self.limits
        check_num("documents", len(documents), limits.max_documents, task.name)
        num_chars = sum(map(len, (*task.queries, *documents)))
        check_chars(num_chars, limits.max_input_chars, task.name)
        return split_documents(task, documents, context.headers)


class Reranking(_Pairs):
    """Rank documents by relevance to a query."""

    name = "rerank"
    path = "/v1/rerank"
    aliases = ("/v2/rerank", "/rerank")
    id_prefix = "rerank-"
    options = RerankOptions
    request_type = RerankRequest
    answer_type = RerankAnswer

    def plan(self, request: RerankRequest, context: RequestContext, card: ModelCard) -> Plan:
        if not request.query:
            raise invalid("query", "send text that is not empty")
        documents = [d if isinstance(d, str) else d.text for d in request.documents]
        task = Rerank(
            (request.query,),
            (),
            request.max_tokens_per_doc,
            to_truncate(request.truncate),
            bool(request.raw_scores),
        )
        wanted = tuple(documents) if request.return_documents else ()
        tasks = self._tasks(task, documents, context)
        return to_plan(request, context, tasks, RerankOptions(request.top_n, wanted))

    def answer(self, options: RerankOptions, head: AnswerHead) -> Answer:
        return WholeAnswer(partial(_rank, options, head))

    def describe(self, request: RerankRequest) -> dict[str, Any]:
        return {"input.count": len(request.documents), "top_n": request.top_n}


class Scoring(_Pairs):
    """Score pairs of texts."""

    name = "score"
    path = "/v1/score"
    aliases = ("/score",)
    id_prefix = "score-"
    request_type = ScoreRequest
    answer_type = ScoreAnswer

    def read(self, body: bytes, context: RequestContext) -> ScoreRequest:
        request: ScoreRequest = super().read(body, context)
        if isinstance(request.text_1, list) and (
            not isinstance(request.text_2, list) or len(request.text_1) != len(request.text_2)
        ):
            raise invalid("text_1", "send one text, or as many as in text_2")
        return request

    def plan(self, request: ScoreRequest, context: RequestContext, card: ModelCard) -> Plan:
        is_list = isinstance(request.text_2, list)
        documents = request.text_2 if isinstance(request.text_2, list) else [request.text_2]
        queries = request.text_1 if isinstance(request.text_1, list) else [request.text_1]
        task = Rerank(
            tuple(queries),
            (),
            truncate=to_truncate(request.truncate),
            name="text_2",
            first=0 if is_list else None,
        )
        return to_plan(request, context, self._tasks(task, documents, context), NoOptions())

    def answer(self, options: NoOptions, head: AnswerHead) -> Answer:
        return WholeAnswer(partial(_score, head))


def _rank(
    options: RerankOptions, head: AnswerHead, events: Sequence[ChoiceEvent], totals: Totals
) -> RerankAnswer:
    scores, texts = scores_of(events), options.documents
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results = [
        RerankResult(index, scores[index], ReturnedDocument(texts[index]) if texts else UNSET)
        for index in best[: options.top_n]
    ]
    usage, meta = InputUsage.of(totals), {"scorer": "cross_encoder"}
    return RerankAnswer(head.id, head.model, results, usage, meta, timings_of(totals))


def _score(head: AnswerHead, events: Sequence[ChoiceEvent], totals: Totals) -> ScoreAnswer:
    data = [PairScore(index, score) for index, score in enumerate(scores_of(events))]
    usage, timings = InputUsage.of(totals), timings_of(totals)
    return ScoreAnswer(head.id, head.created, head.model, data, usage, timings=timings)


def scores_of(events: Sequence[ChoiceEvent]) -> list[float]:
    """The scores of all tasks, in the order of the documents."""
    scores = {choice: event.data for choice, event in events if isinstance(event, Scores)}
    return array("f", b"".join(data for _, data in sorted(scores.items()))).tolist()
