"""`POST /v1/embeddings`: a vector for each text, list of token ids or image; `POST /v1/rerank`: documents by relevance
to a query; `POST /v1/score`: relevance scores of pairs of texts.

`/v1/embeddings` is OpenAI's API. Inputs can also be Jina's `{"text": ...}` and `{"image": ...}`. Instead of `input`, a
request can have vLLM's `messages`: one user message, whose text or image becomes one vector. `/v1/rerank` has the
fields that Cohere's, Jina's and vLLM's APIs have in common. `/v1/score` is vLLM's API.

Source: OpenAI API reference, "Create embeddings"; Jina, "Embeddings API"; vLLM, "Embeddings API with chat messages",
"Score API"; Cohere and Jina API references, "Rerank".
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from gateway.api.answers import WholeAnswer, encode
from gateway.api.completions import ImageContent, TextContent
from gateway.api.fields import (
    ModelName,
    Positive,
    RequestStruct,
    ServiceTier,
    ShowsTimings,
    TokenId,
    User,
    check_chars,
    check_num,
    doc,
    find_priority,
    invalid,
    missing,
    timings_of,
    wants_timings,
)
from gateway.calls.kept import BY_NAME
from gateway.calls.key_limits import CHARS_PER_TOKEN, TOKENS_PER_IMAGE
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.resume import KEY_HEADER
from gateway.calls.surface import Answer, AnswerHead, NoOptions, Plan, Surface, Totals
from gateway.http.body import unsupported
from gateway.http.errors import InvalidRequest
from gateway.http.exchange import RequestContext
from gateway.media.loader import ImageSource
from shared.protocol import (
    Embed,
    ImagePart,
    ModelCard,
    Rerank,
    Scores,
    Task,
    TextPart,
    TokensPart,
    Truncate,
    Vectors,
)
from shared.settings.limits import LimitSettings

TokenIds = list[TokenId]
_BYTES_PER_NUMBER = 4

QUERY_PROMPTS = ("query", "search_query")
DOCUMENT_PROMPTS = ("document", "passage", "search_document")
#: Names of prompts by `input_type`, a field of other APIs. The first name that the model has is used.
_PROMPTS_OF_TYPE = {
    **dict.fromkeys(QUERY_PROMPTS, QUERY_PROMPTS),
    **dict.fromkeys(DOCUMENT_PROMPTS, DOCUMENT_PROMPTS),
    "classification": ("classification",),
    "clustering": ("clustering",),
}

#: The end at which long inputs are truncated, as in TEI. true: END. false and NONE: long inputs are refused.
Truncation = bool | Literal["NONE", "START", "END"]
Item = TypeVar("Item")

#: Limits of one call: estimated tokens, and inputs. Larger requests are split into calls, which several workers run.
MAX_CALL_TOKENS = 8192
MAX_CALL_INPUTS = 256


class InputFields(RequestStruct, frozen=True, kw_only=True):
    model: ModelName
    truncate: Annotated[
        Truncation | None, doc("The end at which inputs that are too long are cut.")
    ] = None
    user: User = None
    service_tier: ServiceTier | None = None
    timings: ShowsTimings = None


class InputUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]

    @classmethod
    def of(cls, totals: Totals) -> "InputUsage":
        prompt = totals.prompt
        details = {
            "cached_tokens": prompt.num_cached_tokens,
            "image_tokens": prompt.num_image_tokens,
        }
        return cls(prompt.num_prompt_tokens, prompt.num_prompt_tokens, details)


class TextInput(RequestStruct, frozen=True, kw_only=True):
    """A text or an image: a `data:` URL, plain base64, a file's id, or an http(s) URL if the operator enables it."""

    text: str | None = None
    image: str | None = None


class EmbeddingTurn(RequestStruct, frozen=True, kw_only=True):
    """A user message, which becomes one vector."""

    role: Literal["user"]
    content: str | Annotated[list[TextContent | ImageContent], Meta(min_length=1)]


class EmbeddingRequest(InputFields, frozen=True, kw_only=True):
    """The body of `POST /v1/embeddings`, with `input` or `messages`."""

    #: Empty or omitted in requests with `messages`.
    input: str | list[str | TokenId | TokenIds | TextInput] | UnsetType = UNSET
    messages: Annotated[list[EmbeddingTurn], Meta(min_length=1, max_length=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    normalized: Annotated[bool | None, doc("false returns vectors that are not normalized.")] = None
    #: vLLM's field: truncate inputs to this number of tokens; -1: to the model's maximum
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    prompt_name: Annotated[str | None, doc("Name of the prompt to put before each text.")] = None
    input_type: (
        Literal[
            "search_query",
            "search_document",
            "classification",
            "clustering",
            "query",
            "document",
            "passage",
        ]
        | None
    ) = None


class Embedding(msgspec.Struct):
    """One vector. `embedding` is a list of numbers, or little-endian float32 in base64."""

    index: int
    embedding: Sequence[float] | memoryview
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    """All vectors, in the order of the inputs."""

    model: str
    data: list[Embedding]
    usage: InputUsage
    object: str = "list"
    timings: dict[str, float] | UnsetType = UNSET


class EmbeddingOptions(msgspec.Struct, frozen=True):
    is_base64: bool = False


class Embeddings(Surface):
    """Compute embeddings of texts and images."""

    name = "embeddings"
    path = "/v1/embeddings"
    tag = "embeddings"
    task = "embed"
    id_prefix = "embd-"
    batchable = True
    options = EmbeddingOptions
    request_type: type[msgspec.Struct] | None = EmbeddingRequest
    answer_type: type[msgspec.Struct] | None = EmbeddingList
    commas = "max_input_commas"

    def plan(self, request: EmbeddingRequest, context: RequestContext, card: ModelCard) -> Plan:
        inputs = Inputs(request, card, self.limits)
        check_dimensions(request.dimensions, card)
        if (most := request.truncate_prompt_tokens) == 0:
            problem = "send at least 1, or -1 for the model's maximum"
            raise invalid("truncate_prompt_tokens", problem)
        task = Embed(
            (),
            prompt_name=_find_prompt(request, card),
            dimensions=request.dimensions,
            is_normalized=request.normalized is not False,
            truncate=_find_truncation(request),
            max_tokens=None if most == -1 else most,
            first=0 if inputs.is_list else None,
        )
        tasks = split_inputs(task, inputs.parts, card, context.headers)
        options = EmbeddingOptions(request.encoding_format == "base64")
        return to_plan(request, context, tasks, options, inputs.images)

    def answer(self, options: EmbeddingOptions, head: AnswerHead) -> Answer:
        return WholeAnswer(partial(_to_list, options, head))

    def describe(self, request: EmbeddingRequest) -> dict[str, Any]:
        return {
            "embedding.dimensions": request.dimensions,
            "input.count": len(request.input) if isinstance(request.input, list) else 1,
        }

    def describe_fields(self, properties: dict[str, Any]) -> None:
        limits = self.limits
        properties["input"]["description"] = (
            f"At most {limits.max_inputs} inputs, {limits.max_input_tokens} tokens, "
            f"{limits.max_input_chars} characters and {limits.max_input_images} images together."
        )


class Inputs:
    """The inputs of a request as parts of tasks, and their images. Raises: InvalidRequest."""

    def __init__(self, request: EmbeddingRequest, card: ModelCard, limits: LimitSettings) -> None:
        _check_kinds(request)
        items = request.input
        self.images: list[ImageSource] = []
        self._card = card
        self.parts: list[TextPart | TokensPart | ImagePart] = []
        if request.messages is not None:
            self.is_list = False
            self.parts.append(self._to_input(request.messages[0].content))
        else:
            assert items is not UNSET
            self.is_list = not isinstance(items, str) and not isinstance(items[0], int)
            for index, item in enumerate(items if self.is_list else [items]):
                param = f"input.[{index}]" if self.is_list else "input"
                self.parts.append(self._part(item, param))
        self._check(limits)

    def _to_input(self, content: str | list[TextContent | ImageContent]) -> TextPart | ImagePart:
        """The input in a message. Texts are joined by line breaks. Raises: InvalidRequest for text with an image."""
        param = "messages.[0].content"
        if isinstance(content, str):
            content = [TextContent(text=content)]
        texts = [part.text for part in content if isinstance(part, TextContent)]
        if len(content) > 1 and len(texts) < len(content):
            raise invalid(param, "one vector is made of text or of one image; send one of them")
        if not texts:
            [part] = content
            assert isinstance(part, ImageContent)
            for name in ("min_pixels", "max_pixels"):
                if getattr(part, name):
                    raise unsupported(f"{param}.[0].{name}")
            url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
            return self._image(url, f"{param}.[0].image_url")
        if not any(texts):
            raise invalid(param, "send text that is not empty, or an image")
        return TextPart("\n".join(texts))

    def _part(self, item: Any, param: str) -> TextPart | TokensPart | ImagePart:
        if isinstance(item, TextInput):
            if (item.text is None) == (item.image is None):
                raise invalid(param, "send an object with either text or image")
            if item.image is not None:
                return self._image(item.image, f"{param}.image")
            item, param = item.text, f"{param}.text"
        if not item:
            raise invalid(param, "send text or token ids that are not empty")
        if isinstance(item, str):
            return TextPart(item)
        if max(item) >= self._card.vocab_size:
            raise invalid(param, f"send token ids below {self._card.vocab_size}")
        return TokensPart(tuple(item))

    def _image(self, url: str, param: str) -> ImagePart:
        if not self._card.supports_images:
            raise invalid(param, "this model does not support images", code="unsupported_input")
        self.images.append(to_image(url, param))
        return ImagePart(len(self.images) - 1)

    def _check(self, limits: LimitSettings) -> None:
        check_num("inputs", len(self.parts), limits.max_inputs, "input")
        check_num("images", len(self.images), limits.max_input_images, "input")
        texts = [part.text for part in self.parts if isinstance(part, TextPart)]
        check_chars(sum(map(len, texts)), limits.max_input_chars, "input")
        ids = sum(len(part.token_ids) for part in self.parts if isinstance(part, TokensPart))
        if ids > limits.max_input_tokens:
            raise InvalidRequest(
                f"The inputs are too long: send at most {limits.max_input_tokens} token ids in all.",
                param="input",
                code="too_many_tokens",
            )


def _to_list(
    options: EmbeddingOptions, head: AnswerHead, events: Sequence[ChoiceEvent], totals: Totals
) -> EmbeddingList:
    data = [
        Embedding(index, row if options.is_base64 else numbers_of(row))
        for index, row in enumerate(rows_of(events))
    ]
    return EmbeddingList(head.model, data, InputUsage.of(totals), timings=timings_of(totals))


def to_image(url: str, param: str) -> ImageSource:
    """An image given as a URL, as the id of an uploaded image, or in base64."""
    schemes = ("data:", "http://", "https://")
    if not url[:8].lower().startswith(schemes) and not url.startswith(BY_NAME):
        url = f"data:;base64,{url}"
    return ImageSource(url, param)


def rows_of(events: Sequence[ChoiceEvent]) -> Iterator[memoryview]:
    """The vectors of all tasks, in the order of the inputs. Units: bytes of little-endian float32."""
    vectors = {choice: event for choice, event in events if isinstance(event, Vectors)}
    for _, event in sorted(vectors.items()):
        data, size = memoryview(event.data), event.dimensions * _BYTES_PER_NUMBER
        for begin in range(0, len(data), size):
            yield data[begin : begin + size]


def numbers_of(row: memoryview) -> Any:
    """A vector as a JSON list, encoded alone so that the thread of the event loop is not blocked for long."""
    return msgspec.Raw(encode(row.cast("f").tolist()))


def _check_kinds(request: EmbeddingRequest) -> None:
    """Check that all inputs have one kind; a list of numbers is a single input. Raises: InvalidRequest."""
    items = request.input
    if request.messages is not None:
        if items:
            raise invalid("input", "send either input or messages, not both")
        return
    if items is UNSET:
        raise missing("input")
    if not items:
        raise invalid("input", "send text, token ids or messages; the input is empty")
    if isinstance(items, str):
        return
    if len({type(item) if isinstance(item, int | list) else str for item in items}) > 1:
        problem = "send token ids, lists of token ids, or texts and images, and do not mix them"
        raise invalid("input", problem)


def check_dimensions(dimensions: int | None, card: ModelCard) -> None:
    """Raises: InvalidRequest for dimensions that the model was not trained for."""
    allowed = (*card.shorter_dimensions, card.dimensions)
    if dimensions is not None and dimensions not in allowed:
        raise invalid("dimensions", f"send one of {', '.join(map(str, allowed))}")


def check_prompt(name: str, param: str, card: ModelCard) -> str:
    """Return `name`, if the model has a prompt of this name. Raises: InvalidRequest."""
    if name not in card.prompts:
        offered = ", ".join(card.prompts) or "none"
        raise invalid(param, f"the prompts of this model are: {offered}")
    return name


def _find_prompt(request: EmbeddingRequest, card: ModelCard) -> str | None:
    """`Embed.prompt_name` of a request. Raises: InvalidRequest."""
    if request.prompt_name is not None:
        return check_prompt(request.prompt_name, "prompt_name", card)
    if request.input_type is None or not card.prompts:
        return ""
    names = _PROMPTS_OF_TYPE[request.input_type]
    found = next((name for name in names if name in card.prompts), None)
    if found is not None or names == DOCUMENT_PROMPTS:  # documents need no prompt
        return found
    message = f"the prompts of this model are: {', '.join(card.prompts)}; name one in prompt_name"
    raise invalid("input_type", message)


def _find_truncation(request: EmbeddingRequest) -> Truncate:
    """Where to truncate: at the `end` if only `truncate_prompt_tokens` is sent. Raises: InvalidRequest."""
    truncate = to_truncate(request.truncate)
    if request.truncate_prompt_tokens is None or truncate != "none":
        return truncate
    if request.truncate is not None:
        raise invalid("truncate", "send true, START or END with truncate_prompt_tokens")
    return "end"


# Shared with reranking and vector stores


def to_truncate(value: bool | str | None) -> Truncate:
    names: dict[object, Truncate] = {"START": "start", "END": "end", True: "end"}
    return names.get(value, "none")


def to_plan(
    request: InputFields,
    context: RequestContext,
    tasks: Sequence[Task],
    options: msgspec.Struct,
    images: Sequence[ImageSource] = (),
) -> Plan:
    return Plan(
        tasks,
        options,
        images,
        num_prompts=len(tasks),
        shows_timings=wants_timings(request.timings, context.headers),
        priority=find_priority(request.service_tier, context),
    )


def split_inputs(
    task: Embed,
    parts: Sequence[TextPart | TokensPart | ImagePart],
    card: ModelCard,
    headers: Mapping[bytes, bytes],
) -> list[Embed]:
    def num_tokens(part: TextPart | TokensPart | ImagePart) -> int:
        if isinstance(part, TextPart):
            return len(part.text) // CHARS_PER_TOKEN + 1
        if isinstance(part, TokensPart):
            return len(part.token_ids)
        return card.image_tokens or TOKENS_PER_IMAGE

    return [
        replace(task, inputs=tuple(some), first=None if task.first is None else first)
        for first, some in _split(parts, num_tokens, headers)
    ]


def split_documents(
    task: Rerank, documents: Sequence[str], headers: Mapping[bytes, bytes]
) -> list[Rerank]:
    """Split documents into tasks of limited size, each with the request's only query or with one query per document."""
    many, longest = len(task.queries) > 1, max(map(len, task.queries))
    return [
        replace(
            task,
            queries=task.queries[first : first + len(part)] if many else task.queries,
            documents=tuple(part),
            first=None if task.first is None else first,
        )
        for first, part in _split(
            documents, lambda text: (longest + len(text)) // CHARS_PER_TOKEN, headers
        )
    ]


def _split(
    items: Sequence[Item], num_tokens: Callable[[Item], int], headers: Mapping[bytes, bytes]
) -> Iterator[tuple[int, Sequence[Item]]]:
    """For each call, the index of its first item, and its items."""
    if KEY_HEADER in headers:  # an idempotency key identifies one call
        yield 0, items
        return
    begin, total = 0, 0
    for index, item in enumerate(items):
        count = num_tokens(item)
        if index > begin and (total + count > MAX_CALL_TOKENS or index - begin >= MAX_CALL_INPUTS):
            yield begin, items[begin:index]
            begin, total = index, 0
        total += count
    yield begin, items[begin:]


class TextDocument(RequestStruct, frozen=True, kw_only=True):
    text: str


Document = str | TextDocument
Documents = Annotated[list[Document], Meta(min_length=1)]


class RerankRequest(InputFields, frozen=True, kw_only=True):
    query: str
    documents: Documents
    top_n: Positive | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[
        Positive | None, doc("Documents are truncated to this number of tokens.")
    ] = None
    raw_scores: Annotated[bool | None, doc("Return the model's scores without activation.")] = None


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
    """Results, most relevant documents first. Equal scores keep the order of the request."""

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

    def _tasks(
        self, task: Rerank, documents: Sequence[str], context: RequestContext
    ) -> list[Rerank]:
        """Check the limits, and split the documents into tasks. Raises: InvalidRequest."""
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

    def plan(self, request: ScoreRequest, context: RequestContext, card: ModelCard) -> Plan:
        is_list = isinstance(request.text_2, list)
        documents = request.text_2 if isinstance(request.text_2, list) else [request.text_2]
        queries = request.text_1 if isinstance(request.text_1, list) else [request.text_1]
        if isinstance(request.text_1, list) and not (is_list and len(queries) == len(documents)):
            raise invalid("text_1", "send one text, or as many as in text_2")
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
