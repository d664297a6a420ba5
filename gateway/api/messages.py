"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API.

Source: Anthropic API reference, "Messages", "Streaming Messages", "Count Message tokens", "Errors".
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Union

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.api.answers import Addition, Block, BlockStream, WholeAnswer, encode, find_tokenized
from gateway.api.completions import ReasoningEffort
from gateway.api.fields import (
    UNSUPPORTED,
    CallName,
    EchoedStruct,
    Ignored,
    ModelName,
    Positive,
    SamplingFields,
    UserName,
    check_most,
    doc,
    find_priority,
    invalid,
    missing,
    translate_sampling,
    wants_timings,
)
from gateway.api.generation import (
    Conversation,
    FunctionField,
    Offer,
    Part,
    Role,
    check_constraints,
    check_grammar,
    find_tools,
    schema_grammar,
    switch_thinking,
)
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, NoOptions, Plan, Surface, Totals
from gateway.http.errors import ApiError
from gateway.http.exchange import RequestContext, sse_event
from gateway.media.loader import ImageSource
from shared.protocol import (
    THINKING_SWITCHES,
    Finished,
    FinishReason,
    Generate,
    Grammar,
    ModelCard,
    TemplateOption,
    Tokens,
    ToolCall,
    Tools,
    Usage,
)
from shared.settings.limits import MAX_TOOL_NAME_CHARS, LimitSettings

_BILLING_HEADER = "x-anthropic-billing-header:"
_STOP_REASONS = {FinishReason.LENGTH: "max_tokens", FinishReason.TOOL_CALLS: "tool_use"}
#: OpenAI's status -> Anthropic's status and error type.
_ERRORS = {
    401: (401, "authentication_error"),
    403: (403, "permission_error"),
    404: (404, "not_found_error"),
    413: (413, "request_too_large"),
    429: (429, "rate_limit_error"),
    503: (529, "overloaded_error"),
    504: (504, "timeout_error"),
}


class Base64Source(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="base64"):
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: str


class UrlSource(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="url"):
    """An http(s) URL of an image. The operator must enable such URLs."""

    url: str


class FileSource(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="file"):
    file_id: str


class TextBlock(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


class ImageBlock(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="image"):
    source: Base64Source | UrlSource | FileSource


class ThinkingBlock(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str


class SkippedBlock(EchoedStruct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A skipped block, from the tools or the reasoning of another server."""


def _skipped(tag: str) -> Any:
    return msgspec.defstruct(
        tag, [], bases=(SkippedBlock,), tag_field="type", tag=tag, frozen=True, kw_only=True
    )


_SKIPPED_TAGS = (
    "redacted_thinking",
    "server_tool_use",
    "mcp_tool_use",
    "mcp_tool_result",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
)


class TextSource(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    data: str


class ContentSource(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="content"):
    content: "str | list[TextBlock | ImageBlock]"


class DocumentBlock(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="document"):
    source: TextSource | ContentSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(EchoedStruct, frozen=True, tag_field="type", tag="search_result"):
    source: str
    title: str
    content: list[TextBlock]


class ToolReference(EchoedStruct, frozen=True, tag_field="type", tag="tool_reference"):
    tool_name: str


class ToolUseBlock(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: CallName
    name: Annotated[str, Meta(max_length=MAX_TOOL_NAME_CHARS)]
    input: msgspec.Raw | UnsetType = UNSET


class ToolResultBlock(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a call. `is_error` has no effect: the model sees the content."""

    tool_use_id: CallName
    content: (
        str
        | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReference]
        | None
    ) = None


#: Blocks of messages and tool results that become part of the prompt.
ShownBlock = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReference
InputBlock = Union[
    TextBlock,
    ImageBlock,
    DocumentBlock,
    SearchResultBlock,
    ThinkingBlock,
    ToolUseBlock,
    ToolResultBlock,
    *map(_skipped, _SKIPPED_TAGS),  # type: ignore[misc]
]


class MessageParam(EchoedStruct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class MessageMetadata(EchoedStruct, frozen=True, kw_only=True):
    user_id: UserName | None = None


class Thinking(EchoedStruct, frozen=True, kw_only=True):
    """Whether the model reasons. `budget_tokens` has no effect."""

    type: Literal["enabled", "disabled", "adaptive"]


class MessageFormat(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    schema: msgspec.Raw


class OutputConfig(EchoedStruct, frozen=True, kw_only=True):
    format: MessageFormat | None = None
    effort: ReasoningEffort | None = None


class MessageTool(FunctionField, frozen=True, kw_only=True):
    """A function; Anthropic's own tool types are skipped."""

    parameters: msgspec.Raw | UnsetType = msgspec.field(default=UNSET, name="input_schema")
    type: str | None = None


class MessageToolChoice(EchoedStruct, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class PromptFields(SamplingFields, frozen=True, kw_only=True):
    """Fields that both endpoints accept. Sampling fields have no effect on token counts."""

    stop: list[str] | None = msgspec.field(default=None, name="stop_sequences")
    model: ModelName
    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[
        MessageFormat | None, doc("An older name of `output_config.format`.")
    ] = None
    tools: list[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    metadata: MessageMetadata | None = None
    cache_control: Ignored = UNSET
    betas: Ignored = UNSET
    speed: Ignored = UNSET

    @property
    def user(self) -> str | None:
        return None if self.metadata is None else self.metadata.user_id


class CountTokensRequest(PromptFields, frozen=True, kw_only=True):
    pass


class MessageRequest(PromptFields, frozen=True, kw_only=True):
    max_tokens: Positive
    stream: bool | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    diagnostics: Ignored = UNSET
    inference_geo: Ignored = UNSET


class MessageText(msgspec.Struct, tag_field="type", tag="text"):
    """Text of the answer. `citations` are required by Anthropic's schema; some clients refuse null."""

    text: str
    citations: tuple[str, ...] = ()


class MessageThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class DirectCaller(msgspec.Struct, frozen=True, tag_field="type", tag="direct"):
    """The caller of a function: the model itself."""


class MessageToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw
    caller: DirectCaller = DirectCaller()


Content = MessageText | MessageThinking | MessageToolUse


class MessageUsage(msgspec.Struct):
    """Token counts with Anthropic's names. `input_tokens` excludes cached tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    cache_creation: None = None
    inference_geo: None = None
    output_tokens_details: None = None
    server_tool_use: None = None
    service_tier: str = "standard"
    image_tokens: int = 0  #: an extension: image tokens of the whole prompt

    @classmethod
    def of(cls, prompt: Usage, num_output: int) -> "MessageUsage":
        cached = prompt.num_cached_tokens
        return cls(
            prompt.num_prompt_tokens - cached,
            num_output,
            cached,
            image_tokens=prompt.num_image_tokens,
        )


class MessageObject(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """A complete answer, or an empty one in `message_start`."""

    id: str
    role: str = "assistant"
    model: str
    content: Sequence[Content] = ()
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    usage: MessageUsage


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class StopDelta(msgspec.Struct):
    stop_reason: str
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None


class MessageEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An event of a stream; its fields depend on the type."""

    type: str
    message: MessageObject | None = None
    index: int | None = None
    content_block: Content | None = None
    delta: Any = None  #: `TextDelta`, `ThinkingDelta`, `InputJsonDelta` or `StopDelta`
    usage: MessageUsage | None = None


class TokenCount(msgspec.Struct):
    input_tokens: int


class AnthropicErrorFields(msgspec.Struct):
    """The error; `code` and `param` are extensions."""

    type: str
    message: str
    code: str | None
    param: str | None
    #: Set if the request has the unsupported field `thread`: Anthropic's tool runner then continues without it.
    details: dict[str, Any] | UnsetType = UNSET


class AnthropicError(msgspec.Struct):
    error: AnthropicErrorFields
    type: str = "error"
    request_id: str | None = None


class MessageOptions(msgspec.Struct, frozen=True):
    with_thinking: bool = False


class _Anthropic(Surface):
    tag = "messages"
    error_type = AnthropicError
    statuses: ClassVar = {"503": "529"}
    hints: ClassVar = {
        "messages.content.type": "Send text, image, document, search_result, thinking, tool_use or tool_result.",
        "messages.content.source.type": "Send base64, url or file for an image, text or content for a document.",
    }

    def error(self, error: ApiError) -> tuple[int, bytes]:
        return render_error(error)

    def error_frame(self, error: ApiError, answer: Answer) -> bytes:
        return sse_event(render_error(error)[1], b"error")


def render_error(error: ApiError) -> tuple[int, bytes]:
    kind = "invalid_request_error" if error.status < 500 else "api_error"
    status, type_ = _ERRORS.get(error.status, (error.status, kind))
    fields = AnthropicErrorFields(type_, error.message, error.code, error.param)
    if error.param == "thread":
        fields.details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return status, encode(AnthropicError(fields, request_id=error.request_id))


class Messages(_Anthropic):
    """Answer a conversation (Anthropic's API)."""

    name = "message"
    operation = "chat"
    path = "/v1/messages"
    task = "generate"
    id_prefix = "msg_"
    options = MessageOptions
    request_type = MessageRequest
    answer_type = MessageObject
    chunk_type = MessageEvent
    traced = ("stream", "max_tokens", "temperature", "top_p", "top_k")
    unsupported = UNSUPPORTED["/v1/messages"]

    def plan(self, request: MessageRequest, context: RequestContext, card: ModelCard) -> Plan:
        conversation = _translate(request, self.limits)
        sampling = translate_sampling(
            request, self.limits, context, card.sampling, request.max_tokens
        )
        task = Generate(
            tuple(conversation.messages),
            sampling,
            template_options=_thinking(request, card, context),
            ending=conversation.ending,
            grammar=_grammar(request, card, self.limits),
            tools=_tools(request, card, self.limits),
        )
        return Plan(
            [check_constraints(task)],
            MessageOptions(request.thinking is not None and request.thinking.type != "disabled"),
            conversation.sources,
            is_streamed=bool(request.stream),
            shows_timings=wants_timings(None, context.headers),
            priority=find_priority(None, context),
        )

    def answer(self, options: MessageOptions, head: AnswerHead) -> Answer:
        return MessageAnswer(options, head)


class CountTokens(_Anthropic):
    """Count the tokens of a conversation (Anthropic's API)."""

    name = "count_tokens"
    path = "/v1/messages/count_tokens"
    task = "tokenize"
    id_prefix = "count_"
    request_type = CountTokensRequest
    answer_type = TokenCount
    unsupported = UNSUPPORTED["/v1/messages/count_tokens"]

    def plan(self, request: CountTokensRequest, context: RequestContext, card: ModelCard) -> Plan:
        options, tools = _thinking(request, card, context), _tools(request, card, self.limits)
        return _translate(request, self.limits).count(options, tools)

    def answer(self, options: NoOptions, head: AnswerHead) -> Answer:
        return WholeAnswer(lambda events, _: TokenCount(find_tokenized(events).num_tokens))


def _translate(request: PromptFields, limits: LimitSettings) -> Conversation:
    """Translate the system prompt and the messages. Raises: InvalidRequest."""
    check_most("messages", len(request.messages), limits.max_messages, "messages")
    conversation = Conversation()
    if request.system:
        texts = request.system
        blocks = [texts] if isinstance(texts, str) else [block.text for block in texts]
        # Claude Code's first line differs in each request, which would defeat prefix caching.
        if blocks and blocks[0].startswith(_BILLING_HEADER):
            blocks = [blocks[0].partition("\n")[2], *blocks[1:]]
        shown = [conversation.text(text) for text in blocks if text]
        if shown:
            conversation.add("system", shown)
    for index, message in enumerate(request.messages):
        blocks = _blocks(message.content)
        _add_blocks(conversation, message.role, blocks, f"messages.[{index}].content")
    conversation.check("messages", limits, f"messages.[{len(request.messages) - 1}].role")
    return conversation


def _blocks(content: str | Sequence[Any]) -> Sequence[Any]:
    return [TextBlock(text=content)] if isinstance(content, str) else content


def _add_blocks(
    conversation: Conversation,
    role: Literal["user", "assistant", "system"],
    blocks: Sequence[InputBlock],
    param: str,
) -> None:
    """Add the message, and a tool message for each tool result."""
    parts: list[Part] = []
    calls: list[ToolCall] = []
    thought = ""
    for index, block in enumerate(blocks):
        place = f"{param}.[{index}]"
        match block:
            case TextBlock() | ImageBlock() | DocumentBlock() | SearchResultBlock():
                parts += _parts(conversation, block, role, place)
            case ThinkingBlock() if role == "assistant":
                thought += block.thinking
            case ToolUseBlock() if role == "assistant":
                given = b"{}" if block.input is UNSET else bytes(block.input)
                calls.append(ToolCall(block.id, block.name, given.decode()))
            case ToolUseBlock():
                raise invalid(f"{place}.type", "only assistants send tool_use; send tool_result")
            case ToolResultBlock() if role == "user":
                shown = _blocks(block.content or "")
                results = _all_parts(conversation, shown, "tool", f"{place}.content")
                conversation.add("tool", [*results], call_id=block.tool_use_id)
            case ToolResultBlock():
                raise invalid(f"{place}.type", "only the user sends tool_result; send tool_use")
            case _:
                pass
    if parts or calls or not any(isinstance(block, ToolResultBlock) for block in blocks):
        conversation.add(role, parts or [conversation.text("")], thought, calls)


def _all_parts(
    conversation: Conversation, blocks: Sequence[ShownBlock], role: Role, place: str
) -> Iterator[Part]:
    for index, block in enumerate(blocks):
        yield from _parts(conversation, block, role, f"{place}.[{index}]")


def _parts(conversation: Conversation, block: ShownBlock, role: Role, place: str) -> Iterator[Part]:
    match block:
        case TextBlock():
            yield conversation.text(block.text)
        case ToolReference():
            yield conversation.text(block.tool_name)
        case SearchResultBlock():
            texts = (block.title, block.source, *(each.text for each in block.content))
            yield conversation.text("\n".join(texts))
        case DocumentBlock():
            for text in filter(None, (block.title, block.context)):
                yield conversation.text(f"{text}\n")
            source = block.source
            blocks = _blocks(source.data if isinstance(source, TextSource) else source.content)
            yield from _all_parts(conversation, blocks, role, f"{place}.source.content")
        case ImageBlock():
            url, name = _url(block.source)
            yield conversation.medium(ImageSource(url, f"{place}.source.{name}"), role)


def _url(source: Base64Source | UrlSource | FileSource) -> tuple[str, str]:
    """The URL of an image, and the name of its field."""
    if isinstance(source, UrlSource):
        return source.url, "url"
    if isinstance(source, FileSource):
        return source.file_id, "file_id"
    return f"data:{source.media_type};base64,{source.data}", "data"


def _grammar(request: MessageRequest, card: ModelCard, limits: LimitSettings) -> Grammar | None:
    """The grammar of the answer. None: free text. Raises: InvalidRequest."""
    wanted = request.output_format
    param = "output_format.schema"
    if request.output_config is not None and request.output_config.format is not None:
        wanted, param = request.output_config.format, "output_config.format.schema"
    if wanted is None:
        return None
    return check_grammar(schema_grammar(bytes(wanted.schema), param, limits), card)


def _tools(request: PromptFields, card: ModelCard, limits: LimitSettings) -> Tools | None:
    """The functions that the model may or must call. None: no functions. Raises: InvalidRequest."""
    choice = request.tool_choice or MessageToolChoice(type="auto")
    if choice.type == "tool" and not choice.name:
        raise missing("tool_choice.name")
    offer = Offer(
        functions=[
            (f"tools.[{index}]", tool)
            for index, tool in enumerate(request.tools or ())
            if tool.type in (None, "custom")
        ],
        names=frozenset((choice.name,)) if choice.type == "tool" and choice.name else None,
        may_call=choice.type != "none",
        must_call=choice.type in ("any", "tool"),
        is_parallel=not choice.disable_parallel_tool_use,
        schema_field="input_schema",
    )
    return find_tools(offer, card, limits)


def _thinking(
    request: PromptFields, card: ModelCard, context: RequestContext
) -> dict[str, TemplateOption]:
    """The chat template's variables for reasoning and effort."""
    thinking, config = request.thinking, request.output_config
    options: dict[str, TemplateOption] = {}
    if thinking is not None and thinking.type != "adaptive":
        has_switch = not THINKING_SWITCHES.isdisjoint(card.template_options)
        if thinking.type == "enabled" or has_switch:  # else "disabled" only hides the reasoning
            options |= switch_thinking(card, thinking.type == "enabled", "thinking", context)
    if config is not None and config.effort is not None:
        if "reasoning_effort" in card.template_options:
            options["reasoning_effort"] = config.effort
        else:
            context.ignore("output_config.effort")
    return options


class MessageAnswer(BlockStream):
    def __init__(self, options: MessageOptions, head: AnswerHead) -> None:
        super().__init__(head, with_thought=options.with_thinking)

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        self._blocks.add_all(events)
        self._blocks.complete()
        message = self._message(MessageUsage.of(totals.prompt, totals.num_output_tokens))
        message.content = [_to_content(block) for block in self._blocks.all]
        message.stop_reason, message.stop_sequence = _stop(totals.finished[0])
        return encode(message)

    def begun(self, prompt: Usage) -> bytes:
        return _event("message_start", message=self._message(MessageUsage.of(prompt, 0)))

    def grown(self, event: Tokens, added: Sequence[Addition]) -> bytes:
        data = b""
        for block, text, _ in added:
            data += self.grow(block)
            if text:
                delta = _DELTAS[block.kind](text)
                data += _event("content_block_delta", index=block.index, delta=delta)
        return data

    def opened(self, block: Block) -> bytes:
        content = _to_content(block, is_empty=True)
        data = _event("content_block_start", index=block.index, content_block=content)
        return data if block.index else data + _event("ping")

    def closed(self, block: Block, totals: Totals | None) -> bytes:
        return _event("content_block_stop", index=block.index)

    def ended(self, totals: Totals) -> bytes:
        usage = MessageUsage.of(totals.prompt, totals.num_output_tokens)
        delta = StopDelta(*_stop(totals.finished[0]))
        return _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def _message(self, usage: MessageUsage) -> MessageObject:
        return MessageObject(id=self.head.id, model=self.head.model, usage=usage)


#: Delta types by kind of block.
_DELTAS = {"thought": ThinkingDelta, "text": TextDelta, "call": InputJsonDelta}


def _to_content(block: Block, *, is_empty: bool = False) -> Content:
    """The content of a block. `is_empty`: without its text, for the event that opens a block."""
    if block.kind == "call":
        given = msgspec.Raw(b"{}") if is_empty else block.json
        return MessageToolUse(block.call_id, block.name, given)
    text = "" if is_empty else block.text
    return MessageThinking(text) if block.kind == "thought" else MessageText(text)


def _event(type_: str, **fields: Any) -> bytes:
    return sse_event(encode(MessageEvent(type=type_, **fields)), type_.encode())


def _stop(event: Finished) -> tuple[str, str | None]:
    """The stop reason and the stop sequence of a message."""
    if event.stopped_by:
        return "stop_sequence", event.stopped_by
    return _STOP_REASONS.get(event.finish_reason, "end_turn"), None
