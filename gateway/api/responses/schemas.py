"""Structs of the Responses API: requests, answers and events.

An answer has all fields that Open Responses requires; unused fields are null.

Source: OpenAI API reference, "Create a model response"; Open Responses specification, 2026-04-24.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.api.chat.schemas import (
    ChatLogprob,
    Detail,
    ReasoningEffort,
    RefusalContent,
    RequestMetadata,
)
from gateway.api.fields import (
    AudioData,
    CallName,
    EchoedStruct,
    Ignored,
    IgnoredStreamFields,
    ModelName,
    RequestStruct,
    SamplingFields,
    ServiceTier,
    ShowsTimings,
    Timings,
    User,
    VideoFields,
    doc,
)
from gateway.api.generation import Arguments, JsonObjectFormat, TextFormat
from shared.settings.limits import (
    MAX_FORMAT_DESCRIPTION_CHARS,
    MAX_FORMAT_NAME_CHARS,
    MAX_RESPONSE_ID_CHARS,
    MAX_TOOL_NAME_CHARS,
)

ResponseId = Annotated[str, Meta(min_length=1, max_length=MAX_RESPONSE_ID_CHARS)]


class InputText(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class PlainText(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A text of any role."""

    text: str


class OutputText(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str


class ReasoningText(
    EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"
):
    text: str


class InputImage(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="input_image"):
    """An image: a `data:` URL, or an http(s) one if the operator allows it."""

    image_url: str | None = None
    file_id: str | None = None
    detail: Detail | None = None


class InputVideo(VideoFields, frozen=True, kw_only=True, tag_field="type", tag="input_video"):
    """A video, which OpenAI's API lacks: a `data:` or http(s) URL, or the id of an uploaded file."""

    video_url: str | None = None
    file_id: str | None = None


class InputAudio(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="input_audio"):
    """Audio in base64."""

    input_audio: AudioData


class InputFile(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="input_file"):
    """An uploaded image, video or audio."""

    file_id: str


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
    """A message, with or without `type`; reasoning; a call, or its output."""

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


class ResponseTool(EchoedStruct, frozen=True, kw_only=True):
    """A function; tools of other types are ignored."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: msgspec.Raw | UnsetType = UNSET
    strict: bool | None = None


class ResponseNamedTool(EchoedStruct, frozen=True, kw_only=True):
    type: Literal["function"]
    name: str


class ResponseChoice(EchoedStruct, frozen=True, kw_only=True, omit_defaults=True):
    """`tool_choice` as an object. Some clients also send none, auto and required as objects."""

    type: Literal["function", "allowed_tools", "auto", "none", "required"]
    name: str | None = None  #: of the function
    tools: list[ResponseNamedTool] | None = None  #: allowed functions
    mode: Literal["auto", "required"] | None = None  #: whether to call one


ResponseToolChoice = Literal["none", "auto", "required"] | ResponseChoice


class ResponseFormat(RequestStruct, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    schema: msgspec.Raw
    name: Annotated[str, Meta(max_length=MAX_FORMAT_NAME_CHARS)]
    description: Annotated[str, Meta(max_length=MAX_FORMAT_DESCRIPTION_CHARS)] | None = None
    strict: Annotated[
        bool | None, doc("false ignores keywords of the schema that are not supported.")
    ] = None


class TextConfig(RequestStruct, frozen=True, kw_only=True):
    format: TextFormat | JsonObjectFormat | ResponseFormat | None = None
    verbosity: Ignored = UNSET


class Reasoning(RequestStruct, frozen=True, kw_only=True):
    effort: ReasoningEffort | None = None
    summary: Ignored = UNSET
    generate_summary: Ignored = UNSET
    context: Ignored = UNSET


class ResponseFields(SamplingFields, frozen=True, kw_only=True):
    """Fields of both requests. Sampling fields have no effect on token counts."""

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
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
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
    """Token counts in the names of this API."""

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
    description: str | None = None
    parameters: msgspec.Raw | None = None
    strict: bool | None = None
    type: Literal["function"] = "function"


class ResponseObject(msgspec.Struct, kw_only=True):
    """A complete or partial response."""

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
