"""Ollama's API: `/api/chat`, `generate`, `embed`, `embeddings`, `tags`, `show`, `ps` and `version`.

A stream is JSON lines, and requests stream by default.

Source: Ollama, "API", of 2026-08-21.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.api.answers import Block, Blocks, WholeAnswer, encode
from gateway.api.completions import ChatLogprob, to_logprobs
from gateway.api.fields import (
    UNSUPPORTED,
    CallName,
    Count,
    EchoedStruct,
    Ignored,
    ModelName,
    Positive,
    RepetitionPenalty,
    RequestStruct,
    SamplingFields,
    User,
    UserName,
    check_model,
    check_most,
    copy_fields,
    doc,
    find_num_logprobs,
    find_priority,
    invalid,
    translate_sampling,
)
from gateway.api.generation import (
    CallField,
    Conversation,
    Part,
    Role,
    ToolField,
    any_object,
    check_constraints,
    check_grammar,
    find_effort,
    find_tools,
    read_calls,
    read_offer,
    schema_grammar,
    switch_thinking,
)
from gateway.api.pooling import EmbeddingOptions, EmbeddingRequest, Embeddings, numbers_of, rows_of
from gateway.calls.models import ModelDirectory
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, Frame, Plan, Surface, Totals
from gateway.http.endpoint import Caller, Resource, operation
from gateway.http.errors import ApiError, Headers
from gateway.http.exchange import RequestContext
from gateway.media.loader import ImageSource
from shared.protocol import (
    FinishReason,
    Generate,
    Grammar,
    ModelCard,
    TemplateOption,
    TextPart,
    Tokens,
    ToolCall,
    Tools,
)
from shared.settings.limits import LimitSettings
from shared.version import package_version

_LATEST = ":latest"
_NS = 1_000_000_000
_NOT_KEPT = (b"0", b'"0"', b'"0s"', b'"0m"')
_LINES: Headers = [
    (b"content-type", b"application/x-ndjson"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class OllamaOptions(SamplingFields, frozen=True, kw_only=True):
    """Sampling options. Options for loading a model have no effect."""

    is_lenient: ClassVar[bool] = True
    prefix: ClassVar[str] = "options."
    repetition_penalty: RepetitionPenalty | None = msgspec.field(
        default=None, name="repeat_penalty"
    )
    num_predict: Annotated[
        Annotated[int, Meta(ge=-2)] | None,
        doc("Maximum number of tokens; below 1: up to the end of the context."),
    ] = None


class OllamaMessage(EchoedStruct, frozen=True, kw_only=True):
    """A message, with images in base64. A tool message has the function's name or the call's id."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: list[str] | None = None
    thinking: str | None = None
    tool_calls: list[CallField] | None = None
    tool_name: CallName | None = None
    tool_call_id: CallName | None = None


class OllamaRequest(RequestStruct, frozen=True, kw_only=True):
    model: ModelName
    stream: bool | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: Annotated[
        Ignored, doc("No effect. A request with 0 and no prompt gets `done_reason`: `unload`.")
    ] = UNSET
    truncate: Ignored = UNSET
    shift: Ignored = UNSET
    format: Annotated[msgspec.Raw | UnsetType, doc("`json`, or a JSON Schema.")] = UNSET
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    user: User = None


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True):
    messages: list[OllamaMessage]
    tools: list[ToolField] | None = None


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True):
    prompt: str = ""
    system: str | None = None
    images: list[str] | None = None
    raw: Annotated[bool | None, doc("Send the prompt without the chat template.")] = None
    context: Annotated[Ignored, doc("Tokens of an earlier answer; no effect.")] = UNSET


class OllamaEmbedRequest(RequestStruct, frozen=True, kw_only=True):
    model: ModelName
    input: str | list[str]
    dimensions: Positive | None = None
    truncate: Annotated[bool | None, doc("false refuses inputs that are too long.")] = None
    options: OllamaOptions | None = None
    keep_alive: Ignored = UNSET
    user: User = None


class OllamaEmbeddingsRequest(RequestStruct, frozen=True, kw_only=True):
    """The body of `POST /api/embeddings`, the older path."""

    model: ModelName
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: Ignored = UNSET
    user: UserName | None = None


class OllamaVectors(msgspec.Struct, kw_only=True):
    """The answer. `embedding` is only in answers of the older path. Durations are in nanoseconds."""

    model: str | UnsetType = UNSET
    embedding: Sequence[float] | UnsetType = UNSET
    embeddings: Sequence[Sequence[float]] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET


class OllamaCalled(msgspec.Struct):
    index: int
    name: str
    arguments: msgspec.Raw


class OllamaSaidCall(msgspec.Struct):
    id: str
    function: OllamaCalled


class OllamaSaid(msgspec.Struct):
    """The message of an answer, or a delta of the message in a stream."""

    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaSaidCall] | UnsetType = UNSET


class OllamaLine(msgspec.Struct, kw_only=True):
    """An answer, or a line of a stream. The last line has token counts, and durations in nanoseconds."""

    model: str
    created_at: str
    message: OllamaSaid | UnsetType = UNSET  #: in `/api/chat`
    response: str | UnsetType = UNSET  #: in `/api/generate`
    thinking: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaError(msgspec.Struct):
    """Ollama's error; `code` and `param` are extensions."""

    error: str
    code: str | None = None
    param: str | None = None


class OllamaAnswerOptions(msgspec.Struct, frozen=True):
    with_thinking: bool = False
    with_logprobs: bool = False


class _Ollama(Surface):
    tag = "ollama"
    task = "generate"
    id_prefix = "ollama-"
    answer_type = OllamaLine
    error_type = OllamaError
    options = OllamaAnswerOptions
    stream_headers = _LINES
    keep_alive = b""  # no keep-alive comments in streams, because clients parse every line as JSON
    is_chat = False

    def read(self, body: bytes, context: RequestContext) -> Any:
        return _without_tag(super().read(body, context))

    def _plan(
        self,
        request: OllamaRequest,
        conversation: Conversation,
        context: RequestContext,
        card: ModelCard,
        *,
        tools: Tools | None = None,
        is_raw: bool = False,
    ) -> Plan:
        last = f"messages.[{len(conversation.messages) - 1}].role"
        conversation.check("messages", self.limits, last)
        options = request.options or OllamaOptions()
        most = options.num_predict if (options.num_predict or 0) > 0 else None
        sampling = translate_sampling(
            options,
            self.limits,
            context,
            card.sampling,
            most,
            "options.num_predict",
            num_logprobs=find_num_logprobs(request.logprobs, request.top_logprobs, self.limits),
        )
        check_model(sampling, card, "options.")
        messages, prompt = tuple(conversation.messages), None
        if is_raw:
            [prompt], messages = messages[-1].parts, ()
            assert isinstance(prompt, TextPart)
        task = Generate(
            messages,
            sampling,
            template_options=_thinking(request, card, context),
            ending=conversation.ending,
            prompt=prompt,
            grammar=_grammar(request, card, self.limits),
            tools=tools,
        )
        return Plan(
            [check_constraints(task, "options.")],
            OllamaAnswerOptions(request.think is not False, bool(request.logprobs)),
            conversation.sources,
            is_streamed=request.stream is not False,
            shows_timings=True,
            priority=find_priority(None, context),
        )

    def without_worker(self, request: OllamaRequest, head: AnswerHead) -> bytes | None:
        """The answer to a request without a prompt. Ollama would load or unload the model; here, nothing happens."""
        if not self.is_empty(request):
            return None
        kept = b"" if request.keep_alive is UNSET else bytes(request.keep_alive)
        line = OllamaLine(model=head.model, created_at=_time(head.created), done=True)
        line.done_reason = "unload" if kept in _NOT_KEPT else "load"
        if self.is_chat:
            line.message = OllamaSaid("assistant", "")
        else:
            line.response = ""
        return encode(line) + b"\n"

    def is_empty(self, request: Any) -> bool:
        """Whether the request has no prompt."""
        raise NotImplementedError

    def answer(self, options: OllamaAnswerOptions, head: AnswerHead) -> Answer:
        return OllamaAnswer(options, head, is_chat=self.is_chat)

    def error(self, error: ApiError) -> tuple[int, bytes]:
        return render_error(error)

    def error_frame(self, error: ApiError, answer: Answer) -> bytes:
        return render_error(error)[1] + b"\n"

    def numbered(self, frame: bytes, position: int) -> bytes:
        return frame


def render_error(error: ApiError) -> tuple[int, bytes]:
    return error.status, encode(OllamaError(error.message, error.code, error.param))


def _without_tag(request: Any) -> Any:
    return msgspec.structs.replace(request, model=request.model.removesuffix(_LATEST))


def _thinking(
    request: OllamaRequest, card: ModelCard, context: RequestContext
) -> dict[str, TemplateOption]:
    if isinstance(request.think, str):
        effort = "high" if request.think == "max" else request.think  # templates have no "max"
        return find_effort(card, effort, "think", context)
    return {} if request.think is None else switch_thinking(card, request.think, "think", context)


def _grammar(request: OllamaRequest, card: ModelCard, limits: LimitSettings) -> Grammar | None:
    """The grammar of the answer. None: free text. Raises: InvalidRequest."""
    wanted = b"null" if request.format is UNSET else bytes(request.format)
    if wanted in (b"null", b'""'):
        return None
    is_any = wanted == b'"json"'
    grammar = any_object("format") if is_any else schema_grammar(wanted, "format", limits)
    return check_grammar(grammar, card)


def _parts(
    conversation: Conversation,
    text: str,
    images: Sequence[str] | None,
    param: str,
    role: Role = "user",
) -> tuple[Part, ...]:
    """The parts of a message: images, then the text, as in Ollama's templates."""
    shown: list[Part] = []
    for index, image in enumerate(images or ()):
        url = image if image.startswith("data:") else f"data:image;base64,{image}"
        shown.append(conversation.medium(ImageSource(url, f"{param}.[{index}]"), role))
    return (*shown, conversation.text(text))


def _answered(message: OllamaMessage, called: list[ToolCall]) -> str:
    """The id of the call that a result answers. Results without an id are matched by name or order."""
    if message.tool_call_id is not None:
        return message.tool_call_id
    for place, call in enumerate(called):
        if message.tool_name in (None, "", call.name):
            return called.pop(place).id
    return ""


class OllamaChat(_Ollama):
    """Answer a conversation (Ollama's API)."""

    name = "ollama_chat"
    operation = "chat"
    path = "/api/chat"
    request_type = OllamaChatRequest
    unsupported = UNSUPPORTED["/api/chat"]
    is_chat = True

    def is_empty(self, request: OllamaChatRequest) -> bool:
        return not request.messages

    def plan(self, request: OllamaChatRequest, context: RequestContext, card: ModelCard) -> Plan:
        messages = request.messages
        check_most("messages", len(messages), self.limits.max_messages, "messages")
        conversation = Conversation()
        called: list[ToolCall] = []  # calls without a result
        for index, message in enumerate(messages):
            param = f"messages.[{index}]"
            shown, role = f"{param}.images", message.role
            parts = _parts(conversation, message.content, message.images, shown, role)
            if role == "tool":
                conversation.add("tool", parts, call_id=_answered(message, called))
                continue
            calls = read_calls(message.tool_calls, param) if role == "assistant" else []
            called = calls or called
            conversation.add(role, parts, message.thinking or "", calls)
        tools = find_tools(read_offer(request.tools, None, None), card, self.limits)
        return self._plan(request, conversation, context, card, tools=tools)


class OllamaGenerate(_Ollama):
    """Continue a prompt (Ollama's API)."""

    name = "ollama_generate"
    operation = "text_completion"
    path = "/api/generate"
    request_type = OllamaGenerateRequest
    unsupported = UNSUPPORTED["/api/generate"]

    def is_empty(self, request: OllamaGenerateRequest) -> bool:
        return not (request.prompt or request.images)

    def plan(
        self, request: OllamaGenerateRequest, context: RequestContext, card: ModelCard
    ) -> Plan:
        conversation = Conversation()
        if request.raw and (request.images or request.system):
            raise invalid("raw", "leave out system and images, or send raw: false")
        if request.system:
            conversation.add("system", [conversation.text(request.system)])
        conversation.add("user", _parts(conversation, request.prompt, request.images, "images"))
        return self._plan(request, conversation, context, card, is_raw=bool(request.raw))


class OllamaEmbed(Embeddings):
    """Embed texts (Ollama's API)."""

    name = "ollama_embed"
    operation = "embeddings"
    path = "/api/embed"
    tag = "ollama"
    batchable = False
    request_type = OllamaEmbedRequest
    answer_type = OllamaVectors
    error_type = OllamaError
    input_field = "input"

    def read(self, body: bytes, context: RequestContext) -> EmbeddingRequest:
        request = _without_tag(self._body.decode(body, context))
        given: str | list[str] = getattr(request, self.input_field)
        if not given:
            raise invalid(self.input_field, "send text that is not empty")
        return EmbeddingRequest(
            model=request.model,
            input=given if isinstance(given, str) else [*given],
            dimensions=getattr(request, "dimensions", None),
            truncate=getattr(request, "truncate", None) is not False,
            user=request.user,
        )

    def plan(self, request: EmbeddingRequest, context: RequestContext, card: ModelCard) -> Plan:
        return msgspec.structs.replace(super().plan(request, context, card), shows_timings=True)

    def answer(self, options: EmbeddingOptions, head: AnswerHead) -> Answer:
        return WholeAnswer(partial(_to_vectors, head))

    def error(self, error: ApiError) -> tuple[int, bytes]:
        if (error.param or "").startswith("input"):
            error.param = self.input_field
        return render_error(error)

    def describe_fields(self, properties: dict[str, Any]) -> None:
        pass


class OllamaEmbeddings(OllamaEmbed):
    """Embed one text (Ollama's older path)."""

    name = "ollama_embeddings"
    path = "/api/embeddings"
    input_field = "prompt"
    request_type = OllamaEmbeddingsRequest

    def answer(self, options: EmbeddingOptions, head: AnswerHead) -> Answer:
        return WholeAnswer(
            lambda events, _: OllamaVectors(embedding=numbers_of(next(rows_of(events))))
        )


def _to_vectors(head: AnswerHead, events: Sequence[ChoiceEvent], totals: Totals) -> OllamaVectors:
    return OllamaVectors(
        model=head.model,
        embeddings=list(map(numbers_of, rows_of(events))),
        total_duration=_ns((totals.timings or {}).get("e2e_s", 0.0)),
        load_duration=0,
        prompt_eval_count=totals.prompt.num_prompt_tokens,
    )


class OllamaAnswer:
    def __init__(self, options: OllamaAnswerOptions, head: AnswerHead, *, is_chat: bool) -> None:
        self.options = options
        self.head = head
        self.is_chat = is_chat
        self._blocks = Blocks(head.id, with_thought=options.with_thinking)
        self._num_sent = 0  # sent calls
        self._num_tokens = 0

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        self._blocks.add_all(events)
        blocks = self._blocks
        line = self._end(totals, blocks.text, blocks.thought, _uncut(blocks.calls, totals))
        line.logprobs = self._logprobs([event for _, event in events if isinstance(event, Tokens)])
        return encode(line)

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        """One line for events that arrived together. Function calls are sent when complete."""
        frames: list[Frame] = []
        pieces = [event for _, event in events if isinstance(event, Tokens)]
        if pieces:
            self._num_tokens = pieces[-1].index + pieces[-1].num_tokens
        added = [each for event in pieces for each in self._blocks.add(event)]
        text, thought = (
            "".join(piece for block, piece, _ in added if block.kind == kind)
            for kind in ("text", "thought")
        )
        calls = self._blocks.calls[self._num_sent : -1 if totals is None else None]
        self._num_sent += len(calls)
        complete = _uncut(calls, totals)
        logprobs = self._logprobs(pieces)
        if text or thought or complete or logprobs:
            line = self._line(text, thought, complete)
            line.logprobs = logprobs
            frames.append((self._num_tokens, encode(line) + b"\n"))
        if totals is not None:
            end = encode(self._end(totals, "", "", ())) + b"\n"
            frames.append((totals.num_output_tokens + 1, end))
        return frames

    def _logprobs(self, pieces: Sequence[Tokens]) -> list[ChatLogprob] | UnsetType:
        entries = [entry for piece in pieces for entry in piece.logprobs]
        return to_logprobs(entries) if self.options.with_logprobs and entries else UNSET

    def _line(self, text: str, thought: str, calls: Sequence[Block]) -> OllamaLine:
        line = OllamaLine(model=self.head.model, created_at=_time(self.head.created))
        if self.is_chat:
            line.message = OllamaSaid("assistant", text, thought or UNSET)
            if calls:
                known = self._blocks.calls
                line.message.tool_calls = [
                    OllamaSaidCall(c.call_id, OllamaCalled(known.index(c), c.name, c.json))
                    for c in calls
                ]
        else:
            line.response, line.thinking = text, thought or UNSET
        return line

    def _end(self, totals: Totals, text: str, thought: str, calls: Sequence[Block]) -> OllamaLine:
        line = self._line(text, thought, calls)
        timings = totals.timings or {}
        line.done = True
        is_cut = totals.finished[0].finish_reason is FinishReason.LENGTH
        line.done_reason = "length" if is_cut else "stop"
        line.total_duration = _ns(timings.get("e2e_s", 0.0))
        line.load_duration = 0
        line.prompt_eval_count = totals.prompt.num_prompt_tokens
        line.prompt_eval_duration = _ns(
            timings.get("vision_s", 0.0) + timings.get("prefill_s", 0.0)
        )
        line.eval_count = totals.num_output_tokens
        line.eval_duration = _ns(timings.get("decode_s", 0.0))
        return line


def _uncut(calls: Sequence[Block], totals: Totals | None) -> list[Block]:
    """The calls whose arguments are complete. Others are not sent, as clients run each call that they receive."""
    is_cut = totals is not None and totals.finished[0].finish_reason is FinishReason.LENGTH
    return [call for call in calls if call.is_whole or not (call.text or is_cut)]


def _ns(seconds: float) -> int:
    return round(seconds * _NS)


def _time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))  # noqa: TID251


# Model details


class OllamaDetails(msgspec.Struct):
    format: str
    quantization_level: str
    parent_model: str = ""
    family: str = ""
    families: tuple[str, ...] = ()
    parameter_size: str = ""


class OllamaModel(msgspec.Struct, kw_only=True):
    """A model. The gateway does not know its size."""

    name: str
    model: str
    modified_at: str
    digest: str
    details: OllamaDetails
    size: int = 0
    expires_at: str | UnsetType = UNSET
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET

    @classmethod
    def of(cls, card: ModelCard) -> "OllamaModel":
        modified_at, details = _time(card.created_at), _details(card)
        return copy_fields(card, cls, model=card.name, modified_at=modified_at, details=details)


class OllamaModels(msgspec.Struct):
    models: list[OllamaModel]


class OllamaShowRequest(EchoedStruct, frozen=True):
    model: str = ""
    name: str = ""  #: sent by older clients instead of `model`


class OllamaShown(msgspec.Struct, kw_only=True):
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: str
    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    license: str = ""


class OllamaVersion(msgspec.Struct):
    version: str


def _details(card: ModelCard) -> OllamaDetails:
    return OllamaDetails(card.format, card.quantization or card.dtype, card.parent)


@dataclass
class OllamaModelList(Resource):
    tag = "ollama"

    _models: ModelDirectory

    @operation("GET", "/api/tags")
    async def ollama_tags(self, caller: Caller) -> OllamaModels:
        """List models (Ollama's API)."""
        return OllamaModels(
            [OllamaModel.of(card) for card in self._models.usable(caller.context.tenant)]
        )

    @operation("GET", "/api/ps")
    async def ollama_ps(self, caller: Caller) -> OllamaModels:
        """List models that have workers (Ollama's API)."""
        found = []
        for card in self._models.usable(caller.context.tenant):
            if self._models.num_workers[card.queue]:
                found.append(model := OllamaModel.of(card))
                model.expires_at, model.size_vram = _time(2**32), 0  # it does not expire
                model.context_length = card.max_model_len
        return OllamaModels(found)

    @operation("POST", "/api/show")
    async def ollama_show(self, caller: Caller, body: OllamaShowRequest) -> OllamaShown:
        """Show a model (Ollama's API)."""
        card = await self._models.find(
            (body.model or body.name).removesuffix(_LATEST), tenant=caller.context.tenant
        )
        capabilities = {
            "completion": "generate" in card.tasks,
            "embedding": "embed" in card.tasks,
            "vision": card.supports_images,
            "thinking": bool(card.reasoning),
            "tools": card.supports_grammars,
        }
        return OllamaShown(
            details=_details(card),
            model_info={
                "general.architecture": "vlm",
                "general.basename": card.name,
                "vlm.context_length": card.max_model_len,
                "vlm.embedding_length": card.dimensions,
            },
            capabilities=[name for name, has in capabilities.items() if has],
            modified_at=_time(card.created_at),
        )

    @operation("GET", "/api/version")
    async def ollama_version(self, caller: Caller) -> OllamaVersion:
        """Show the version (Ollama's API)."""
        return OllamaVersion(package_version())
