"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API.

Source: Anthropic API reference, "Messages", "Streaming Messages", "Count Message tokens", "Errors".
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from gateway.api.answers import encode, merge_tokens
from gateway.api.chat.schemas import ChatCompletionRequest
from gateway.api.chat.translate import translate_template_options
from gateway.api.conversation import Conversation
from gateway.api.fields import (
    Ignored,
    ModelName,
    Neutral,
    RequestStruct,
    UserName,
    asks_for_something,
    find_priority,
    invalid,
    wants_timings,
)
from gateway.api.openapi import branch, describe_operation
from gateway.api.sampling import SamplingFields, check_max_tokens, seed_of, translate_sampling
from gateway.api.structured import check_grammar, schema_grammar
from gateway.api.tokenize import made_of
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, Frame, Plan, Surface, Totals
from gateway.http import sse
from gateway.http.body import JsonBody, unsupported
from gateway.http.context import RequestContext
from gateway.http.errors import ApiError
from shared.protocol import (
    THINKING_SWITCHES,
    ChatMessage,
    Finished,
    FinishReason,
    Generate,
    Grammar,
    ImagePart,
    ModelCard,
    SamplingParams,
    Started,
    TemplateOption,
    TextPart,
    Tokenize,
    Tokens,
    Usage,
)
from shared.settings.limits import LimitSettings

#: How images begin in base64, by their type: a wrong type is refused, as Anthropic does.
_BEGINNINGS = {
    "image/png": "iVBORw0KGgo",
    "image/jpeg": "/9j/",
    "image/webp": "UklGR",
    "image/gif": "R0lGOD",
}
_STOP_REASONS = {FinishReason.LENGTH: "max_tokens"}
#: The status and the type of an error, by OpenAI's status.
_ERRORS = {
    401: (401, "authentication_error"),
    403: (403, "permission_error"),
    404: (404, "not_found_error"),
    413: (413, "request_too_large"),
    429: (429, "rate_limit_error"),
    503: (529, "overloaded_error"),
    504: (504, "timeout_error"),
}
_TOOL_CHOICES = tuple(
    msgspec.json.encode({"type": kind, **more})
    for kind in ("auto", "none")
    for more in ({}, {"disable_parallel_tool_use": True}, {"disable_parallel_tool_use": False})
)
#: JSON that asks for nothing, by field that is not supported; null always does.
_NEUTRAL: dict[str, tuple[bytes, ...]] = {
    "container": (),
    "context_management": (b"{}", b'{"edits":[]}'),
    "fallbacks": (b"[]",),
    "mcp_servers": (b"[]",),
    "tool_choice": _TOOL_CHOICES,
}


class EchoedStruct(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what clients also send back as an answer had it: further members change nothing."""


class Base64Source(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="base64"):
    """The bytes of an image."""

    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: str


class UrlSource(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="url"):
    """Where an image is: an http(s) URL where the operator allows it."""

    url: str


class TextBlock(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A text."""

    text: str


class ImageBlock(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="image"):
    """An image, of a user's turn."""

    source: Base64Source | UrlSource


class ThinkingBlock(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """What the assistant thought before it answered."""

    thinking: str


class RedactedThinkingBlock(
    EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="redacted_thinking"
):
    """What another server hides of it."""


Block = TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock


class MessageParam(EchoedStruct, frozen=True, kw_only=True):
    """One turn."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class Metadata(EchoedStruct, frozen=True, kw_only=True):
    """Who asks."""

    user_id: UserName | None = None


class Thinking(EchoedStruct, frozen=True, kw_only=True):
    """Whether the model is to think; how much is its own to decide."""

    type: Literal["enabled", "disabled", "adaptive"]


class SchemaFormat(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that conforms to a schema."""

    schema: msgspec.Raw


class OutputConfig(EchoedStruct, frozen=True, kw_only=True):
    """How the text is to be."""

    format: SchemaFormat | None = None


class PromptFields(RequestStruct, frozen=True, kw_only=True):
    """What decides the prompt."""

    model: ModelName
    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    tools: Ignored = UNSET
    cache_control: Ignored = UNSET
    betas: Ignored = UNSET
    speed: Ignored = UNSET
    container: Neutral = UNSET
    context_management: Neutral = UNSET
    fallbacks: Neutral = UNSET
    mcp_servers: Neutral = UNSET
    tool_choice: Neutral = UNSET


class CountTokensRequest(PromptFields, frozen=True, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`."""

    @property
    def user(self) -> None:
        """None is named."""


class MessageRequest(PromptFields, frozen=True, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: Ignored = UNSET
    inference_geo: Ignored = UNSET

    @property
    def user(self) -> str | None:
        """The client's own name for its user."""
        return None if self.metadata is None else self.metadata.user_id


class TextContent(msgspec.Struct, tag_field="type", tag="text"):
    """What the model said."""

    text: str
    citations: None = None


class ThinkingContent(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thought before it."""

    thinking: str
    signature: str = ""


class MessageUsage(msgspec.Struct):
    """Token counts as Anthropic names them: `input_tokens` are those that no cache had."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_creation: None = None
    inference_geo: None = None
    output_tokens_details: None = None
    server_tool_use: None = None
    service_tier: str = "standard"
    image_tokens: int = 0  #: ours: of the whole prompt

    @classmethod
    def of(cls, prompt: Usage, num_output: int) -> "MessageUsage":
        """Of a prompt and an answer."""
        cached = prompt.num_cached_tokens
        return cls(
            prompt.num_prompt_tokens - cached,
            num_output,
            cached,
            image_tokens=prompt.num_image_tokens,
        )


class MessageObject(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """An answer, whole or as it begins."""

    id: str
    role: str = "assistant"
    model: str
    content: Sequence[TextContent | ThinkingContent] = ()
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    usage: MessageUsage


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More of a thought."""

    thinking: str


class StopDelta(msgspec.Struct):
    """Why a message ended."""

    stop_reason: str
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None


class MessageEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An event of a stream: the fields depend on its type."""

    type: str
    message: MessageObject | None = None
    index: int | None = None
    content_block: TextContent | ThinkingContent | None = None
    delta: Any = None  #: `TextDelta`, `ThinkingDelta` or `StopDelta`
    usage: MessageUsage | None = None


class TokenCount(msgspec.Struct):
    """How many tokens a message would have before it."""

    input_tokens: int


class AnthropicErrorFields(msgspec.Struct):
    """What is wrong; `code` and `param` are ours."""

    type: str
    message: str
    code: str | None
    param: str | None


class AnthropicError(msgspec.Struct):
    """Anthropic's envelope."""

    error: AnthropicErrorFields
    type: str = "error"
    request_id: str | None = None


class MessageOptions(msgspec.Struct, frozen=True):
    """How the client wants its answer."""

    with_thinking: bool = False


class CountTokensOptions(msgspec.Struct, frozen=True):
    """There are none."""


_HINTS = {
    "role": "Supported roles are user and assistant; send system as a field of its own.",
    "type": "Supported blocks are text, image and thinking, supported sources base64 and url; "
    "no model calls functions here.",
    "media_type": "Supported types are image/png, image/jpeg, image/webp and image/gif.",
}
_BODY = JsonBody(MessageRequest, hints=_HINTS)
_COUNT_BODY = JsonBody(CountTokensRequest, hints=_HINTS)


class _Anthropic(Surface):
    """What both have in common."""

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits

    def _check(self, request: PromptFields) -> None:
        """Refuse what would change the answer and is not done here. Raises: InvalidRequest."""
        for name, neutral in _NEUTRAL.items():
            if asks_for_something(getattr(request, name), neutral):
                if name == "tool_choice":
                    problem = "no model calls functions here; send auto or none, or leave it out"
                    raise invalid(name, problem, code="unsupported_parameter")
                raise unsupported(name)

    def error(self, error: ApiError) -> tuple[int, bytes]:
        """Anthropic's shape."""
        return _ERRORS.get(error.status, (error.status, ""))[0], _encode_error(error)

    def error_frame(self, error: ApiError, answer: Answer) -> bytes:
        """The same, as the last event."""
        return sse.frame(_encode_error(error), b"error")


def _encode_error(error: ApiError) -> bytes:
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    _, type_ = _ERRORS.get(error.status, (0, kind))
    fields = AnthropicErrorFields(type_, error.message, error.code, error.param)
    return encode(AnthropicError(fields))


class Messages(_Anthropic):
    """A message, whole or streamed."""

    name = "message"
    path = "/v1/messages"
    task = "generate"
    id_prefix = "msg_"
    options = MessageOptions

    def read(self, body: bytes, context: RequestContext) -> MessageRequest:
        """The checked body. Raises: InvalidRequest."""
        request = _BODY.decode(body)
        self._check(request)
        return request

    def plan(self, request: MessageRequest, context: RequestContext, card: ModelCard) -> Plan:
        """One task. Raises: InvalidRequest."""
        conversation = _translate(request, self.limits)
        stop = request.stop_sequences or None
        try:
            sampling = translate_sampling(
                SamplingFields(
                    temperature=request.temperature,
                    top_p=request.top_p,
                    top_k=request.top_k,
                    stop=stop,
                ),
                self.limits,
                seed_of(context),
                card.sampling,
                max_tokens=check_max_tokens(request.max_tokens, "max_tokens", self.limits),
            )
        except ApiError as error:
            error.rename("stop", "stop_sequences")
            raise
        task = Generate(
            tuple(conversation.messages),
            sampling,
            template_options=_thinking(request, card),
            grammar=_grammar(request, card, self.limits),
        )
        return Plan(
            [task],
            MessageOptions(request.thinking is not None and request.thinking.type != "disabled"),
            conversation.sources,
            is_streamed=bool(request.stream),
            shows_timings=wants_timings(None, context.headers),
            priority=find_priority(None, context.headers),
        )

    def answer(self, options: MessageOptions, head: AnswerHead) -> Answer:
        """A `MessageObject` or its events."""
        return MessageAnswer(options, head)

    def describe(self, request: MessageRequest) -> Mapping[str, Any]:
        """What was asked for, in numbers."""
        names = ("max_tokens", "temperature", "top_p", "top_k")
        return {
            "stream": bool(request.stream),
            **{name: getattr(request, name) for name in names},
        }

    def numbered(self, frame: bytes, position: int) -> bytes:
        """Its last event alone has the id: whoever has less of it gets all again."""
        return sse.numbered_last(frame, position)

    def openapi(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the structs that decode a request, with the operator's limits."""
        operation, schemas = describe_operation(
            operation_id="create_message",
            summary="Answer a conversation, in Anthropic's words",
            tag="messages",
            request=MessageRequest,
            answer=MessageObject,
            chunk=MessageEvent,
            error=AnthropicError,
            limits=self.limits,
        )
        properties = schemas["MessageRequest"]["properties"]
        properties["max_tokens"]["maximum"] = self.limits.max_output_tokens
        stops = branch(properties["stop_sequences"], "array")
        stops["maxItems"] = self.limits.max_stop_strings
        stops["items"].update(minLength=1, maxLength=self.limits.max_stop_chars)
        _write_neutral(properties)
        return operation, schemas


class CountTokens(_Anthropic):
    """How many tokens a message would have before it."""

    name = "count_tokens"
    path = "/v1/messages/count_tokens"
    task = "tokenize"
    id_prefix = "count_"
    options = CountTokensOptions

    def read(self, body: bytes, context: RequestContext) -> CountTokensRequest:
        """The checked body. Raises: InvalidRequest."""
        request = _COUNT_BODY.decode(body)
        self._check(request)
        return request

    def plan(self, request: CountTokensRequest, context: RequestContext, card: ModelCard) -> Plan:
        """One task. Raises: InvalidRequest."""
        conversation = _translate(request, self.limits)
        of = Generate(
            tuple(conversation.messages),
            SamplingParams(),
            template_options=_thinking(request, card),
        )
        task = Tokenize(of, with_ids=False)
        return Plan([task], CountTokensOptions(), conversation.sources)

    def answer(self, options: CountTokensOptions, head: AnswerHead) -> Answer:
        """A `TokenCount`."""
        return CountAnswer()

    def openapi(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of the structs that decode a request."""
        operation, schemas = describe_operation(
            operation_id="count_message_tokens",
            summary="Count the tokens of a conversation",
            tag="messages",
            request=CountTokensRequest,
            answer=TokenCount,
            error=AnthropicError,
            limits=self.limits,
        )
        _write_neutral(schemas["CountTokensRequest"]["properties"])
        return operation, schemas


def _write_neutral(properties: dict[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        allowed = [None, *map(msgspec.json.decode, neutral)]
        properties[name] = {"enum": allowed, "default": None, "description": "Unsupported."}


def _translate(request: PromptFields, limits: LimitSettings) -> Conversation:
    """System and messages. Raises: InvalidRequest."""
    if len(request.messages) > limits.max_messages:
        raise invalid("messages", f"send at most {limits.max_messages} messages")
    conversation = Conversation()
    if request.system:
        texts = request.system
        blocks = [texts] if isinstance(texts, str) else [block.text for block in texts]
        parts = tuple(conversation.text(text) for text in blocks)
        conversation.messages.append(ChatMessage("system", parts))
    for index, message in enumerate(request.messages):
        _add_message(conversation, message, f"messages.[{index}]")
    conversation.check_chars("messages", limits)
    if request.messages[-1].role == "assistant":
        raise invalid(
            f"messages.[{len(request.messages) - 1}].role",
            "the last message must not be the assistant's; end with a user message",
        )
    return conversation


def _add_message(conversation: Conversation, message: MessageParam, param: str) -> None:
    if isinstance(message.content, str):
        parts: list[TextPart | ImagePart] = [conversation.text(message.content)]
        conversation.messages.append(ChatMessage(message.role, tuple(parts)))
        return
    parts, thought = [], ""
    for index, block in enumerate(message.content):
        place = f"{param}.content.[{index}]"
        match block:
            case TextBlock():
                parts.append(conversation.text(block.text))
            case ThinkingBlock() if message.role == "assistant":
                thought += conversation.text(block.thinking).text
            case ImageBlock() if message.role == "user":
                parts.append(conversation.image(_url(block, place), f"{place}.source"))
            case ImageBlock():
                raise invalid(place, "images are only allowed in user messages")
            case _:
                pass
    conversation.messages.append(ChatMessage(message.role, tuple(parts), thought))


def _url(block: ImageBlock, place: str) -> str:
    """Raises: InvalidRequest."""
    source = block.source
    if isinstance(source, UrlSource):
        return source.url
    beginning = _BEGINNINGS.get(source.media_type)
    if beginning is not None and not source.data.startswith(beginning):
        raise invalid(f"{place}.source.media_type", "the image is of another type; name its own")
    return f"data:{source.media_type};base64,{source.data}"


def _grammar(request: MessageRequest, card: ModelCard, limits: LimitSettings) -> Grammar | None:
    """What the answer must be; None: any text. Raises: InvalidRequest."""
    wanted = None if request.output_config is None else request.output_config.format
    if wanted is None:
        return None
    grammar = schema_grammar(bytes(wanted.schema), "output_config.format.schema", limits)
    check_grammar(grammar, card)
    return grammar


def _thinking(request: PromptFields, card: ModelCard) -> dict[str, TemplateOption]:
    """The switch of the chat template. Raises: InvalidRequest for a model that cannot think."""
    thinking = request.thinking
    if thinking is None or thinking.type == "adaptive":
        return {}
    has_switch = not THINKING_SWITCHES.isdisjoint(card.template_options)
    if thinking.type == "disabled" and not has_switch:
        return {}  # what it thinks all the same is not shown
    wish = ChatCompletionRequest(
        model=request.model, messages=[], enable_thinking=thinking.type == "enabled"
    )
    try:
        return translate_template_options(wish, card)
    except ApiError as error:
        error.rename("enable_thinking", "thinking")
        raise


class MessageAnswer:
    """One answer, whole or in events."""

    def __init__(self, options: MessageOptions, head: AnswerHead) -> None:
        self.options = options
        self.head = head
        self._has_begun = False
        self._index = -1  # of the block that is open
        self._is_thinking = False

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        """A `MessageObject`."""
        pieces = [event for _, event in events if isinstance(event, Tokens)]
        content: list[TextContent | ThinkingContent] = []
        thought = "".join(event.reasoning for event in pieces)
        if thought and self.options.with_thinking:
            content.append(ThinkingContent(thought))
        content.append(TextContent("".join(event.text for event in pieces)))
        message = self._message(MessageUsage.of(totals.prompt, totals.num_output_tokens))
        message.content = content
        message.stop_reason, message.stop_sequence = _stop(totals.finished[0])
        return encode(message)

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        """Events; those that belong together are one frame."""
        frames: list[Frame] = []
        for _, event in merge_tokens(events):
            if not self._has_begun:
                prompt = event.usage if isinstance(event, Started) else Usage(0)
                frames.append((0, self._begin(prompt)))
            if isinstance(event, Tokens) and (data := b"".join(self._add(event))):
                frames.append((event.index + event.num_tokens, data))
        if totals is not None:
            frames.append((totals.num_output_tokens + 1, b"".join(self._end(totals))))
        return frames

    def _begin(self, prompt: Usage) -> bytes:
        self._has_begun = True
        return _event("message_start", message=self._message(MessageUsage.of(prompt, 0)))

    def _add(self, event: Tokens) -> Iterator[bytes]:
        """The events of the next tokens; none where they complete no text."""
        if event.reasoning and self.options.with_thinking:
            if self._index < 0:
                yield from self._open_block(ThinkingContent(""))
            delta = ThinkingDelta(event.reasoning)
            yield _event("content_block_delta", index=self._index, delta=delta)
        if event.text:
            yield from self._open_text()
            delta = TextDelta(event.text)
            yield _event("content_block_delta", index=self._index, delta=delta)

    def _open_text(self) -> Iterator[bytes]:
        if self._index < 0 or self._is_thinking:
            yield from self._close_block()
            yield from self._open_block(TextContent(""))

    def _open_block(self, block: TextContent | ThinkingContent) -> Iterator[bytes]:
        self._index += 1
        self._is_thinking = isinstance(block, ThinkingContent)
        yield _event("content_block_start", index=self._index, content_block=block)
        if self._index == 0:
            yield _event("ping")

    def _close_block(self) -> Iterator[bytes]:
        if self._index >= 0:
            yield _event("content_block_stop", index=self._index)

    def _end(self, totals: Totals) -> Iterator[bytes]:
        if not self._has_begun:
            yield self._begin(totals.prompt)
        yield from self._open_text()
        yield from self._close_block()
        usage = MessageUsage.of(totals.prompt, totals.num_output_tokens)
        delta = StopDelta(*_stop(totals.finished[0]))
        yield _event("message_delta", delta=delta, usage=usage)
        yield _event("message_stop")

    def _message(self, usage: MessageUsage) -> MessageObject:
        return MessageObject(id=self.head.id, model=self.head.model, usage=usage)


def _event(type_: str, **fields: Any) -> bytes:
    return sse.frame(encode(MessageEvent(type=type_, **fields)), type_.encode())


def _stop(event: Finished) -> tuple[str, str | None]:
    """Why a message ended, and by which of the client's sequences."""
    if event.stopped_by:
        return "stop_sequence", event.stopped_by
    return _STOP_REASONS.get(event.finish_reason, "end_turn"), None


class CountAnswer:
    """A `TokenCount`; it is never streamed."""

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        """The body."""
        return encode(TokenCount(made_of(events).num_tokens))

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        """There are none."""
        return []
