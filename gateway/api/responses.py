"""`POST /v1/responses` and `/v1/responses/input_tokens`: OpenAI's Responses API.

An answer has all fields that Open Responses requires; unused fields are null.

Source: OpenAI API reference, "Create a model response"; Open Responses specification, 2026-04-24.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace
from starlette.responses import Response

from gateway.api.answers import (
    Addition,
    Block,
    BlockStream,
    WholeAnswer,
    encode,
    find_tokenized,
    num_reasoning_tokens,
)
from gateway.api.completions import (
    ChatLogprob,
    Detail,
    ReasoningEffort,
    RefusalContent,
    RequestMetadata,
    to_logprobs,
)
from gateway.api.fields import (
    UNSUPPORTED,
    AudioData,
    CallName,
    Count,
    EchoedStruct,
    Ignored,
    IgnoredStreamFields,
    Listing,
    ModelName,
    Positive,
    RequestStruct,
    SamplingFields,
    ServiceTier,
    ShowsTimings,
    Timings,
    User,
    VideoFields,
    check_most,
    doc,
    find_num_logprobs,
    find_priority,
    find_service_tier,
    invalid,
    missing,
    timings_of,
    translate_sampling,
    wants_timings,
)
from gateway.api.generation import (
    Arguments,
    Conversation,
    FormatName,
    FunctionField,
    JsonObjectFormat,
    JsonSchema,
    Offer,
    Part,
    Role,
    TextFormat,
    any_object,
    check_arguments,
    check_constraints,
    check_grammar,
    find_effort,
    find_tools,
    schema_grammar,
)
from gateway.api.vector_stores import Deleted, ListQuery
from gateway.calls.kept import IMAGE_ID, KeptAnswers
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.resume import Resume
from gateway.calls.surface import Answer, AnswerHead, NoOptions, Plan, Surface, Totals
from gateway.http.endpoint import Caller, Resource, operation
from gateway.http.errors import ApiError, NotFound
from gateway.http.exchange import SSE_DONE, RequestContext, sse_event
from gateway.media.loader import ImageSource
from shared.protocol import (
    ChatMessage,
    FinishReason,
    Generate,
    Grammar,
    ImagePart,
    ImageRef,
    ModelCard,
    OutputLogprob,
    SamplingParams,
    TemplateOption,
    TextPart,
    Tokens,
    ToolCall,
    Tools,
    Usage,
)
from shared.records.store import Record
from shared.settings.limits import (
    MAX_RESPONSE_ID_CHARS,
    MAX_TOOL_NAME_CHARS,
    LimitSettings,
)

ResponseId = Annotated[str, Meta(min_length=1, max_length=MAX_RESPONSE_ID_CHARS)]


class InputText(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class PlainText(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


class OutputText(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str


class ReasoningText(EchoedStruct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class InputImage(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="input_image"):
    """An image: a `data:` URL, or an http(s) URL if the operator allows it."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Detail | None = None


class InputVideo(VideoFields, frozen=True, kw_only=True, tag_field="type", tag="input_video"):
    """A video: a `data:` or http(s) URL, or the id of an uploaded file. An extension of OpenAI's API."""

    video_url: str | None = None
    file_id: str | None = None


class InputAudio(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="input_audio"):
    input_audio: AudioData


class InputFile(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="input_file"):
    """An uploaded image, video or audio, or a `data:` URL of text, an image, a video or audio."""

    file_id: str | None = None
    file_data: str | None = None


InputPart = (
    InputText
    | PlainText
    | OutputText
    | RefusalContent
    | ReasoningText
    | InputImage
    | InputVideo
    | InputAudio
    | InputFile
)


InputItemType = Literal[
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "item_reference",
    "code_interpreter_call",
    "compaction",
    "compaction_summary",
    "context_compaction",
    "computer_call",
    "file_search_call",
    "ghost_snapshot",
    "image_generation_call",
    "mcp_approval_request",
    "mcp_call",
    "mcp_list_tools",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
]
CALL_ITEMS = frozenset(("function_call", "custom_tool_call", "local_shell_call"))
#: Items of tools that OpenAI hosts; ignored.
HOSTED_ITEMS = frozenset(get_args(InputItemType)[9:])


class InputItem(EchoedStruct, frozen=True, kw_only=True):
    """A message, reasoning, a call, or the output of a call. Messages may omit `type`."""

    type: InputItemType = "message"
    id: str | None = None  #: in the output of a local shell call: the call's id
    status: Ignored = UNSET
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: CallName | None = None  #: in calls and their outputs
    name: Annotated[str, Meta(max_length=MAX_TOOL_NAME_CHARS)] | None = None  #: of a call
    arguments: Arguments | None = None  #: of a function's call
    input: str | None = None  #: of a custom tool's call
    action: msgspec.Raw | UnsetType = UNSET  #: of a shell call
    output: str | list[InputPart] | None = None  #: of a call


class ResponseTool(FunctionField, frozen=True, kw_only=True):
    """A function; tools of other types are ignored."""

    type: str
    name: str | None = ""  # type: ignore[assignment]  # null in tools of other types


class ResponseNamedTool(EchoedStruct, frozen=True, kw_only=True):
    type: Literal["function"]
    name: str


class ResponseChoice(EchoedStruct, frozen=True, kw_only=True, omit_defaults=True):
    """`tool_choice` as an object. Some clients also send none, auto and required as objects."""

    type: Literal["function", "allowed_tools", "auto", "none", "required"]
    name: str | None = None  #: of the function
    tools: list[ResponseNamedTool] | None = None  #: allowed functions
    mode: Literal["auto", "required"] | None = None  #: whether the model must call one of them


ResponseToolChoice = Literal["none", "auto", "required"] | ResponseChoice


class ResponseFormat(JsonSchema, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    name: FormatName  # type: ignore[misc]  # required here


class TextConfig(RequestStruct, frozen=True, kw_only=True):
    format: TextFormat | JsonObjectFormat | ResponseFormat | None = None
    verbosity: Ignored = UNSET


class Reasoning(RequestStruct, frozen=True, kw_only=True):
    effort: ReasoningEffort | None = None
    summary: Ignored = UNSET
    generate_summary: Ignored = UNSET
    context: Ignored = UNSET


class ResponseFields(SamplingFields, frozen=True, kw_only=True):
    """Fields that both endpoints accept. Sampling fields have no effect on token counts."""

    model: ModelName
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    user: User = None
    tools: list[ResponseTool] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, doc("`auto` has no effect.")] = None


class CountRequest(ResponseFields, frozen=True, kw_only=True):
    """The body of `POST /v1/responses/input_tokens`."""


class ResponseRequest(ResponseFields, frozen=True, kw_only=True):
    max_output_tokens: Positive | None = None
    top_logprobs: Count | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: IgnoredStreamFields | None = None
    store: Annotated[
        bool | None, doc("false: the answer is not stored, so no request can continue it.")
    ] = None
    metadata: RequestMetadata | None = None
    service_tier: ServiceTier | None = None
    safety_identifier: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Meta(max_length=512)] | None = None
    prompt_cache_options: Ignored = UNSET
    prompt_cache_retention: Ignored = UNSET
    max_tool_calls: Ignored = UNSET
    timings: ShowsTimings = None


WITH_LOGPROBS = "message.output_text.logprobs"


class ResponseText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    logprobs: Sequence[ChatLogprob] = ()
    annotations: tuple[()] = ()


class ReasoningContent(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: str
    content: Sequence[ResponseText]
    role: str = "assistant"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: str
    content: Sequence[ReasoningContent]
    summary: tuple[()] = ()


class CallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


OutputItem = MessageItem | ReasoningItem | CallItem


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    image_tokens: int
    audio_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ShownText(msgspec.Struct):
    format: TextFormat | JsonObjectFormat | ResponseFormat = msgspec.field(
        default_factory=TextFormat
    )


class ShownReasoning(msgspec.Struct):
    effort: str | None = None
    summary: None = None


class ShownTool(msgspec.Struct, frozen=True):
    name: str
    description: str | None
    parameters: msgspec.Raw  # msgspec cannot decode a union with Raw
    strict: bool | None
    type: Literal["function"] = "function"


class ResponseObject(msgspec.Struct, kw_only=True):
    id: str = ""
    object: str = "response"
    created_at: int = 0
    completed_at: int | None = None
    status: str = "in_progress"
    incomplete_details: IncompleteDetails | None = None
    model: str = ""
    previous_response_id: str | None = None
    instructions: str | None = None
    output: Sequence[OutputItem] = ()
    error: ResponseError | None = None
    tools: Sequence[ShownTool] = ()
    tool_choice: ResponseToolChoice = "auto"
    truncation: str = "disabled"
    parallel_tool_calls: bool = True
    text: ShownText = msgspec.field(default_factory=ShownText)
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    temperature: float = 1.0
    reasoning: ShownReasoning | None = None
    usage: ResponseUsage | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    store: bool = True
    background: bool = False
    service_tier: str = "default"
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    timings: Timings = UNSET


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: str = "response.input_tokens"


class ResponseEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An event of a stream; its fields depend on its type."""

    type: str
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: ResponseText | ReasoningContent | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: Sequence[ChatLogprob] | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None


class KeptConversation(msgspec.Struct, frozen=True):
    """A stored response, and the conversation up to its answer."""

    messages: tuple[ChatMessage, ...]  #: without instructions; the last message is the answer
    response: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Continued:
    """A request, and the conversation that it continues."""

    request: Any  #: a `ResponseRequest` or a `CountRequest`
    messages: tuple[ChatMessage, ...]
    images: tuple[ImageRef, ...]


class ResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    response: ResponseObject  #: contains the fields copied from the request
    with_logprobs: bool = False
    #: Stored with the answer; empty if the answer is not stored.
    messages: tuple[ChatMessage, ...] = ()


_SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
#: Fields that a response copies from its request.
_REPEATED = ("previous_response_id", "instructions", "max_output_tokens", "safety_identifier",
             "prompt_cache_key", "user")  # fmt: skip


def _echo(
    request: ResponseRequest, sampling: SamplingParams, service_tier: str | msgspec.UnsetType
) -> ResponseObject:
    """A response with the fields that are copied from the request."""
    form = request.text and request.text.format
    return ResponseObject(
        **{name: getattr(sampling, name) for name in _SAMPLED},
        **{name: getattr(request, name) for name in _REPEATED},
        top_logprobs=request.top_logprobs or 0,
        reasoning=ShownReasoning(request.reasoning and request.reasoning.effort),
        store=request.store is not False,
        service_tier=service_tier or "default",
        metadata=request.metadata or {},
        text=ShownText(form or TextFormat()),
        tools=[_show_tool(tool) for tool in request.tools or () if tool.type == "function"],
        tool_choice=_normalize(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls is not False,
    )


def _grammar(request: ResponseRequest, card: ModelCard, limits: LimitSettings) -> Grammar | None:
    """The grammar of the answer; None: any text. Raises: InvalidRequest."""
    wanted = request.text and request.text.format
    if isinstance(wanted, JsonObjectFormat):
        return check_grammar(any_object("text.format"), card)
    if not isinstance(wanted, ResponseFormat):
        return None
    schema, param = bytes(wanted.schema), "text.format.schema"
    return check_grammar(schema_grammar(schema, param, limits, strict=wanted.strict), card)


def template_options(
    request: ResponseFields, card: ModelCard, context: RequestContext
) -> dict[str, TemplateOption]:
    effort = request.reasoning and request.reasoning.effort
    return find_effort(card, effort, "reasoning.effort", context)


def _show_tool(tool: ResponseTool) -> ShownTool:
    schema = msgspec.Raw(b"null") if tool.parameters is UNSET else tool.parameters.copy()
    return ShownTool(tool.name or "", tool.description, schema, tool.strict)


def _normalize(choice: ResponseToolChoice | None) -> ResponseToolChoice:
    """The choice, as a string if it names no functions."""
    if choice is None:
        return "auto"
    if isinstance(choice, ResponseChoice) and choice.type not in ("function", "allowed_tools"):
        return choice.type
    return choice


def tools_of(request: ResponseFields, card: ModelCard, limits: LimitSettings) -> Tools | None:
    """The functions that the model may or must call. None: no functions. Raises: InvalidRequest."""
    functions = [
        (f"tools.[{index}]", tool)
        for index, tool in enumerate(request.tools or ())
        if tool.type == "function"
    ]
    choice, names = _normalize(request.tool_choice), None
    must_call = choice == "required"
    if isinstance(choice, ResponseChoice) and choice.type == "function":
        if choice.name is None:
            raise missing("tool_choice.name")
        names, must_call = frozenset((choice.name,)), True
    elif isinstance(choice, ResponseChoice):
        if choice.tools is None:
            raise missing("tool_choice.tools")
        names = frozenset(tool.name for tool in choice.tools)
        must_call = choice.mode == "required"
    offer = Offer(
        functions=functions,
        names=names,
        may_call=choice != "none",
        must_call=must_call,
        is_parallel=request.parallel_tool_calls is not False,
    )
    return find_tools(offer, card, limits)


def translate_input(
    request: ResponseFields, limits: LimitSettings, kept: Continued | None
) -> Conversation:
    """Instructions, stored messages and input as one conversation. Raises: InvalidRequest."""
    conversation = Conversation()
    if request.instructions:
        conversation.add("system", [conversation.text(request.instructions)])
    if kept is not None:
        _add_previous(conversation, kept)
    items = request.input
    if isinstance(items, str):
        items = [InputItem(role="user", content=items)]
    _Items(conversation, limits).add(items)
    unit = "messages, earlier ones included"
    check_most("input", len(conversation.messages), limits.max_messages, unit)
    conversation.check("input", limits, "input")
    return conversation


def _add_previous(conversation: Conversation, kept: Continued) -> None:
    """Add the stored messages and images of an earlier answer."""
    for message in kept.messages:
        parts = tuple(
            conversation.text(part.text)
            if isinstance(part, TextPart)
            else conversation.medium(
                ImageSource("", "previous_response_id", kept.images[part.image]), message.role
            )
            for part in message.parts
        )
        conversation.add(
            message.role, parts, message.reasoning, message.tool_calls, message.tool_call_id
        )


class _Items:
    """Translates input items to messages. Reasoning, text and calls of the assistant become one message."""

    def __init__(self, conversation: Conversation, limits: LimitSettings) -> None:
        self._conversation = conversation
        self._limits = limits
        self._thought = ""
        self._said: list[Part] = []
        self._calls: list[ToolCall] = []
        said = conversation.messages  # of the previous response
        self._call_ids = {call.id for message in said for call in message.tool_calls}

    def add(self, items: Sequence[InputItem]) -> None:
        """Add all items. Raises: InvalidRequest."""
        check_most("input", len(items), self._limits.max_messages, "items")
        for index, item in enumerate(items):
            self._add(item, f"input.[{index}]")
        self._end_turn()
        if not self._conversation.messages:
            raise invalid("input", "send at least one message")

    def _add(self, item: InputItem, param: str) -> None:
        if item.type == "reasoning":
            self._end_turn()
            self._thought = _thought(item.content or [])
        elif item.type in CALL_ITEMS:
            self._calls.append(self._call(item, param))
        elif item.type in HOSTED_ITEMS:
            pass
        elif item.type == "item_reference":
            message = "Items are not stored: send the item itself."
            raise NotFound(message, param=f"{param}.id", code="item_not_found")
        elif item.type != "message":
            self._end_turn()
            is_shell = item.type == "local_shell_call_output"  # its `id` is the call's id
            call_id = item.call_id or (item.id if is_shell else None)
            if call_id is None:
                raise missing(f"{param}.call_id")
            if item.output is None:
                raise missing(f"{param}.output")
            if call_id not in self._call_ids and not is_shell:
                problem = "send the id of a call that is in the input or in the previous response"
                raise invalid(f"{param}.call_id", problem)
            parts = self._parts(item.output, "tool", f"{param}.output")
            self._conversation.add("tool", parts, call_id=call_id)
        elif item.role is None:
            raise invalid(f"{param}.role", "send system, developer, user or assistant")
        else:
            self._add_message(item, item.role, param)

    def _add_message(self, item: InputItem, role: str, param: str) -> None:
        content = item.content if item.content is not None else []
        if role == "assistant":
            if self._said or self._calls:
                self._end_turn()
            self._said = self._parts(content, "assistant", f"{param}.content")
            self._said = self._said or [self._conversation.text("")]
            return
        self._end_turn()
        self._thought = ""
        known: Role = "user" if role == "user" else "system"
        self._conversation.add(known, self._parts(content, known, f"{param}.content"))

    def _call(self, item: InputItem, param: str) -> ToolCall:
        name, arguments = item.name, item.arguments or "{}"
        if item.type == "custom_tool_call":
            arguments = msgspec.json.encode({"input": item.input or ""}).decode()
        elif item.type == "local_shell_call":
            name = "local_shell"
            arguments = "{}" if item.action is msgspec.UNSET else bytes(item.action).decode()
        if item.call_id is None:
            raise missing(f"{param}.call_id")
        if name is None:
            raise missing(f"{param}.name")
        arguments = check_arguments(arguments, f"{param}.arguments")
        return ToolCall(item.call_id, name, arguments)

    def _end_turn(self) -> None:
        if self._said or self._calls:
            parts = self._said or [self._conversation.text("")]
            self._conversation.add("assistant", parts, self._thought, self._calls)
            self._call_ids.update(call.id for call in self._calls)
            self._said, self._calls, self._thought = [], [], ""

    def _parts(self, content: str | Sequence[InputPart], role: Role, param: str) -> list[Part]:
        if isinstance(content, str):
            return [self._conversation.text(content)]
        return [self._part(part, role, f"{param}.[{place}]") for place, part in enumerate(content)]

    def _part(self, part: InputPart, role: Role, param: str) -> Part:
        if isinstance(part, RefusalContent):
            return self._conversation.text(part.refusal)
        if isinstance(part, InputFile):
            if part.file_id is None:
                source = ImageSource(part.file_data or "", f"{param}.file_data")
                return self._conversation.file(source, role)
            return self._conversation.medium(ImageSource(part.file_id, f"{param}.file_id"), role)
        if isinstance(part, InputAudio):
            audio = ImageSource(part.input_audio.url, f"{param}.input_audio", is_audio=True)
            return self._conversation.medium(audio, role)
        if not isinstance(part, InputImage | InputVideo):
            return self._conversation.text(part.text)
        kind = "image" if isinstance(part, InputImage) else "video"
        url = part.image_url if isinstance(part, InputImage) else part.video_url
        name = f"{kind}_url" if part.file_id is None else "file_id"
        source = url if part.file_id is None else part.file_id
        if source is None:
            raise invalid(f"{param}.{kind}_url", f"send the {kind} as a data: URL in base64")
        options = part.options(param, self._limits) if isinstance(part, InputVideo) else None
        return self._conversation.medium(
            ImageSource(source, f"{param}.{name}", video=options), role
        )


def _thought(content: str | Sequence[InputPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, ReasoningText))


_SERVER_ERROR = "server_error"
#: Names of a block's content in event types.
_KINDS = {"thought": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}


def _unpack(request: Any) -> tuple[Any, Continued | None]:
    """A request, and the conversation that it continues, if any."""
    return (request.request, request) if isinstance(request, Continued) else (request, None)


class _Input(Surface):
    tag = "responses"
    keeps_answers = True
    hints: ClassVar = {
        "tool_choice": "Send none, auto, required, a function by name or allowed_tools.",
        "input.type": "Send message, reasoning, item_reference, or a call or output such as function_call.",
    }

    def previous(self, request: ResponseFields) -> str | None:
        return request.previous_response_id

    def with_previous(self, request: ResponseFields, kept: Record) -> Continued:
        *messages, answer = read_kept(kept).messages
        if messages and messages[-1].role == "assistant":  # the answer continues this message
            begun = messages.pop()
            texts = [p.text for p in (*begun.parts, *answer.parts) if isinstance(p, TextPart)]
            thought = begun.reasoning + answer.reasoning
            answer = replace(answer, parts=(TextPart("".join(texts)),), reasoning=thought)
        return Continued(request, (*messages, answer), kept.images)

    def error(self, error: ApiError) -> tuple[int, bytes]:
        """Report the field `input`, which workers' errors name `messages`."""
        if error.param is not None and error.param.startswith("messages"):
            error.param = "input"
        return error.status, error.body()


class Responses(_Input):
    """Answer text and images."""

    name = "response"
    operation = "chat"
    path = "/v1/responses"
    task = "generate"
    id_prefix = "resp_"
    batchable = True
    options = ResponseOptions
    request_type = ResponseRequest
    answer_type = ResponseObject
    chunk_type = ResponseEvent
    traced = ("stream", "temperature", "top_p", "top_k", "seed", "max_output_tokens")
    unsupported = UNSUPPORTED["/v1/responses"]

    def record(self, answer: Answer) -> bytes | None:
        assert isinstance(answer, ResponseAnswer)
        return answer.record()

    def plan(self, request: Any, context: RequestContext, card: ModelCard) -> Plan:
        request, kept = _unpack(request)
        priority = find_priority(request.service_tier, context)
        conversation = translate_input(request, self.limits, kept)
        if request.truncation == "auto":
            context.ignore("truncation")
        wants_logprobs = bool(request.top_logprobs) or WITH_LOGPROBS in (request.include or ())
        sampling = translate_sampling(
            request,
            self.limits,
            context,
            card.sampling,
            request.max_output_tokens,
            "max_output_tokens",
            num_logprobs=find_num_logprobs(wants_logprobs, request.top_logprobs, self.limits),
        )
        # the instructions of a request do not apply to the next one
        kept_messages = conversation.messages[1 if request.instructions else 0 :]
        task = Generate(
            tuple(conversation.messages),
            sampling,
            template_options=template_options(request, card, context),
            ending=conversation.ending,
            grammar=_grammar(request, card, self.limits),
            tools=tools_of(request, card, self.limits),
        )
        return Plan(
            [check_constraints(task)],
            ResponseOptions(
                response=_echo(
                    request, sampling, find_service_tier(request.service_tier, priority)
                ),
                with_logprobs=sampling.num_logprobs is not None,
                messages=() if request.store is False else tuple(kept_messages),
            ),
            conversation.sources,
            is_streamed=bool(request.stream),
            shows_timings=wants_timings(request.timings, context.headers),
            priority=priority,
        )

    def answer(self, options: ResponseOptions, head: AnswerHead) -> Answer:
        return ResponseAnswer(options, head)

    def error_frame(self, error: ApiError, answer: Answer) -> bytes:
        assert isinstance(answer, ResponseAnswer)
        return answer.failed(error)


class ResponseQuery(RequestStruct, frozen=True, kw_only=True):
    stream: Literal["false"] = "false"


class ResponseItemsQuery(ListQuery, frozen=True, kw_only=True):
    include: str = ""


class InputItemText(msgspec.Struct, tag_field="type", tag="input_text"):
    text: str


class InputItemImage(msgspec.Struct, tag_field="type", tag="input_image"):
    """An image of the input, without its bytes."""

    image_url: str | None = None
    file_id: str | None = None
    detail: str = "auto"


class ShownItem(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    role: str
    content: list[InputItemText | InputItemImage | ResponseText]
    status: str = "completed"


class CallOutputItem(msgspec.Struct, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: list[InputItemText | InputItemImage | ResponseText]
    status: str = "completed"


class ResponseItemList(Listing[ShownItem | CallItem | CallOutputItem]):
    """A page of a response's input, which includes earlier answers of the conversation."""


def read_kept(record: Record) -> KeptConversation:
    """Raises: NotFound if this version of vlm-fleet cannot decode the record."""
    try:
        return _kept_decoder.decode(record.data)
    except msgspec.MsgspecError:
        raise _not_kept() from None


def _not_kept() -> NotFound:
    return NotFound("There is no such response, or it has expired.", code="response_not_found")


_kept_decoder = msgspec.json.Decoder(KeptConversation)
_PATH = "/v1/responses/{response_id}"


@dataclass
class StoredResponses(Resource):
    tag = "responses"

    _kept: KeptAnswers
    _resume: Resume

    @operation("GET", _PATH, answer_type=ResponseObject)
    async def retrieve_response(self, caller: Caller, query: ResponseQuery) -> Response:
        """Retrieve a stored response."""
        kept = await self._find(caller)
        return Response(bytes(kept.response), media_type="application/json")

    @operation("DELETE", _PATH)
    async def delete_response(self, caller: Caller) -> Deleted:
        """Delete a stored response."""
        tenant, name = caller.context.tenant, caller.path["response_id"]
        if name.startswith(IMAGE_ID) or await self._kept.get(tenant, name) is None:
            raise _not_kept()
        await self._resume.note(name.removeprefix(Responses.id_prefix), is_deleted=True)
        await self._kept.delete(tenant, name)
        return Deleted(name, "response")

    @operation("GET", _PATH + "/input_items")
    async def list_input_items(self, caller: Caller, query: ResponseItemsQuery) -> ResponseItemList:
        """List the input of a stored response."""
        kept = await self._find(caller)
        digits = caller.path["response_id"].removeprefix("resp_")
        items = [
            item
            for index, message in enumerate(kept.messages[:-1])
            for item in _show_message(message, f"{digits}_{index}")
        ]
        ids = {item.id for item in items}
        for param, cursor in (("after", query.after), ("before", query.before)):
            if cursor and cursor not in ids:
                raise invalid(param, "send the id of an item of this list, or leave it out")
        return ResponseItemList.of(*query.choose(items))

    async def _find(self, caller: Caller) -> KeptConversation:
        """Raises: NotFound."""
        record = await self._kept.get(caller.context.tenant, caller.path["response_id"])
        if record is None:
            raise _not_kept()
        return read_kept(record)


def _show_message(
    message: ChatMessage, name: str
) -> Iterator[ShownItem | CallItem | CallOutputItem]:
    parts = [_show(message, part) for part in message.parts]
    if message.role == "tool":
        yield CallOutputItem(f"fco_{name}", message.tool_call_id, parts)
        return
    if not message.tool_calls or any(part != TextPart("") for part in message.parts):
        yield ShownItem(f"msg_{name}", message.role, parts)
    for place, call in enumerate(message.tool_calls):
        yield CallItem(f"fc_{name}_{place}", "completed", call.id, call.name, call.arguments)


def _show(
    message: ChatMessage, part: TextPart | ImagePart
) -> InputItemText | InputItemImage | ResponseText:
    if isinstance(part, ImagePart):
        return InputItemImage()
    return ResponseText(part.text) if message.role == "assistant" else InputItemText(part.text)


class ResponseInputTokens(_Input):
    """Count the tokens of an input, images included."""

    name = "response_input_tokens"
    path = "/v1/responses/input_tokens"
    task = "tokenize"
    id_prefix = "count_"
    request_type = CountRequest
    answer_type = InputTokens
    unsupported = UNSUPPORTED["/v1/responses/input_tokens"]

    def plan(self, request: Any, context: RequestContext, card: ModelCard) -> Plan:
        request, kept = _unpack(request)
        conversation = translate_input(request, self.limits, kept)
        options = template_options(request, card, context)
        return conversation.count(options, tools_of(request, card, self.limits))

    def answer(self, options: NoOptions, head: AnswerHead) -> Answer:
        return WholeAnswer(lambda events, _: InputTokens(find_tokenized(events).num_tokens))


class ResponseAnswer(BlockStream):
    """Encodes the events of a call as a `ResponseObject`, or as the events of a stream.

    A stream begins with `created` and `in_progress`. Each item has `output_item.added`, `content_part.added`, deltas,
    `done` of the text and of the part, and `output_item.done`. A stream ends with `completed` or `incomplete`.
    Reasoning is an item before the message. A call is an item after the message; its deltas are parts of the arguments.

    Sequence numbers must not depend on how tokens are grouped into deltas, because a resumed stream groups them
    differently. So each token reserves a number; each new item reserves one more, as one token may add to two items.

    Source: OpenAI API reference, "Streaming events" of Responses.
    """

    def __init__(self, options: ResponseOptions, head: AnswerHead) -> None:
        super().__init__(head)
        self.options = options
        self._id = head.id.removeprefix("resp_")
        self._sequence = 0
        self._done: list[OutputItem] = []
        self._final: ResponseObject | None = None

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        self._blocks.add_all(events)
        status, last = _status(totals), self._blocks.complete()
        self._done = [
            self._item(block, status if block is last else "completed")
            for block in self._blocks.all
        ]
        self._final = self._response(status, totals)
        return encode(self._final)

    def record(self) -> bytes | None:
        """The record to store: the conversation with the complete answer. None: nothing is stored."""
        if self._final is None or not self.options.messages:
            return None
        blocks = self._blocks
        parts = (TextPart(blocks.text),)
        calls = tuple(ToolCall(call.call_id, call.name, call.text) for call in blocks.calls)
        answer = ChatMessage("assistant", parts, blocks.thought, calls)
        messages = (*self.options.messages, answer)
        return encode(KeptConversation(messages, msgspec.Raw(encode(self._final))))

    def failed(self, error: ApiError) -> bytes:
        response = self._response("failed", None)
        response.error = ResponseError(_SERVER_ERROR, error.message)
        failed = self._event("response.failed", response=response)
        return failed + self._event(
            "error", code=error.code or _SERVER_ERROR, message=error.message, param=error.param
        )

    def begun(self, prompt: Usage) -> bytes:
        response = self._response("in_progress", None)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def grown(self, event: Tokens, added: Sequence[Addition]) -> bytes:
        data, num_unused = b"", event.num_tokens
        for block, text, logprobs in added:
            opening = self.grow(block)
            data += opening
            num_unused += bool(opening) - bool(text or logprobs)
            if text or logprobs:
                shown = self._logprobs(logprobs) if block.kind == "text" else None
                type_ = f"response.{_KINDS[block.kind]}.delta"
                data += self._event(type_, **self._place(block), delta=text, logprobs=shown)
        self._sequence += max(0, num_unused)
        return data

    def opened(self, block: Block) -> bytes:
        item = self._item(block, "in_progress", is_empty=True)
        data = self._event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return data
        part = self._part(block, is_empty=True)
        return data + self._event("response.content_part.added", **self._place(block), part=part)

    def closed(self, block: Block, totals: Totals | None) -> bytes:
        item = self._item(block, "completed" if totals is None else _status(totals))
        place, type_ = self._place(block), f"response.{_KINDS[block.kind]}.done"
        if isinstance(item, CallItem):
            data = self._event(type_, **place, name=item.name, arguments=item.arguments)
        else:
            part = self._part(block)
            logprobs = part.logprobs if isinstance(part, ResponseText) else None
            data = self._event(type_, **place, text=part.text, logprobs=logprobs)
            data += self._event("response.content_part.done", **place, part=part)
        data += self._event("response.output_item.done", output_index=block.index, item=item)
        self._done.append(item)
        return data

    def ended(self, totals: Totals) -> bytes:
        status = _status(totals)
        self._final = self._response(status, totals)
        return self._event(f"response.{status}", response=self._final) + SSE_DONE

    def _item_id(self, block: Block) -> str:
        if block.kind == "call":
            return f"fc_{self._id}_{block.index}"
        return f"{'rs' if block.kind == 'thought' else 'msg'}_{self._id}"

    def _place(self, block: Block) -> dict[str, object]:
        """The fields of events that identify the block."""
        place: dict[str, object] = {"item_id": self._item_id(block), "output_index": block.index}
        return place if block.kind == "call" else place | {"content_index": 0}

    def _event(self, type_: str, **fields: object) -> bytes:
        event = ResponseEvent(type=type_, sequence_number=self._sequence, **fields)  # type: ignore[arg-type]
        self._sequence += 1
        return sse_event(encode(event), type_.encode())

    def _item(self, block: Block, status: str, *, is_empty: bool = False) -> OutputItem:
        """A block as an item. `is_empty`: without content, for the event that adds the item."""
        name = self._item_id(block)
        if block.kind == "call":
            arguments = "" if is_empty else block.text
            return CallItem(name, status, block.call_id, block.name, arguments)
        content: list[Any] = [] if is_empty else [self._part(block)]
        kind = MessageItem if block.kind == "text" else ReasoningItem
        return kind(name, status, content)

    def _part(self, block: Block, *, is_empty: bool = False) -> ResponseText | ReasoningContent:
        text = "" if is_empty else block.text
        if block.kind == "thought":
            return ReasoningContent(text)
        return ResponseText(text, () if is_empty else self._logprobs(block.logprobs))

    def _logprobs(self, logprobs: Sequence[OutputLogprob]) -> list[ChatLogprob]:
        return to_logprobs(logprobs) if self.options.with_logprobs else []

    def _response(self, status: str, totals: Totals | None) -> ResponseObject:
        response = replace(
            self.options.response,
            id=self.head.id,
            created_at=self.head.created,
            status=status,
            model=self.head.model,
            output=tuple(self._done),
        )
        if totals is not None:
            worked_s = max([event.timings.total_s for event in totals.finished], default=0.0)
            response.completed_at = self.head.created + round(worked_s)
            response.usage = to_usage(totals)
            response.timings = timings_of(totals)
            if status == "incomplete":
                response.incomplete_details = IncompleteDetails("max_output_tokens")
        return response


def _status(totals: Totals) -> str:
    is_cut = any(event.finish_reason is FinishReason.LENGTH for event in totals.finished)
    return "incomplete" if is_cut else "completed"


def to_usage(totals: Totals) -> ResponseUsage:
    prompt, num_output = totals.prompt, totals.num_output_tokens
    return ResponseUsage(
        prompt.num_prompt_tokens,
        InputTokensDetails(
            prompt.num_cached_tokens, prompt.num_image_tokens, prompt.num_audio_tokens
        ),
        num_output,
        OutputTokensDetails(num_reasoning_tokens(totals)),
        prompt.num_prompt_tokens + num_output,
    )
