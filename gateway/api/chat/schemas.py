"""Structs of chat requests and responses.

Fixed limits are part of the types; `translate` checks the limits that an operator can change. All limits are defined
in `shared.settings.limits`.

Source: OpenAI API reference, "Create chat completion" and "The chat completion chunk object".
"""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gateway.api.answers import CompletionUsage, PromptLogprobs
from gateway.api.fields import (
    AudioData,
    EchoedStruct,
    Ignored,
    IgnoredStreamFields,
    ModelName,
    RequestStruct,
    SamplingOfFrames,
    Timings,
    VideoFields,
    doc,
)
from gateway.api.generation import (
    CalledFunction,
    CallField,
    StructuredFields,
    ToolChoice,
    ToolField,
)
from shared.protocol import TemplateOption
from shared.settings.limits import (
    MAX_METADATA_ENTRIES,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    MAX_NAME_CHARS,
)

Detail = Literal["auto", "low", "high", "original"]


class IgnoredImageFields(RequestStruct, frozen=True, kw_only=True):
    """Image options without effect: the model's own resolution is used."""

    detail: Detail = "auto"


class ImageUrl(IgnoredImageFields, frozen=True, kw_only=True):
    """An image: a `data:` URL, or an http(s) one if the operator allows it."""

    url: str


class IgnoredPartFields(RequestStruct, frozen=True, kw_only=True):
    """Cache hints that some clients add to parts; no effect."""

    cache_control: Ignored = UNSET
    prompt_cache_breakpoint: Ignored = UNSET


class TextContent(IgnoredPartFields, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


PixelCount = Annotated[int, Meta(ge=1, lt=2**31)]


class PixelFields(RequestStruct, frozen=True, kw_only=True):
    """Minimum and maximum pixels to scale an image or a frame to, within the model's limits."""

    min_pixels: PixelCount | None = None
    max_pixels: PixelCount | None = None


class MediaFields(RequestStruct, frozen=True, kw_only=True):
    """Options for all media of a kind."""

    video: SamplingOfFrames | None = None


class ImageContent(IgnoredPartFields, frozen=True, kw_only=True, tag_field="type", tag="image_url"):
    """An image; many clients send the URL as a string."""

    image_url: ImageUrl | str
    min_pixels: Annotated[
        PixelCount | None,
        doc("Minimum pixels to scale the image to; overrides `mm_processor_kwargs`."),
    ] = None
    max_pixels: PixelCount | None = None


class VideoUrl(VideoFields, frozen=True, kw_only=True):
    """A video: a `data:` URL of a file or of JPEG frames, an http(s) one if the operator allows it, or a file's id."""

    url: str


class VideoContent(IgnoredPartFields, frozen=True, kw_only=True, tag_field="type", tag="video_url"):
    """A video."""

    video_url: VideoUrl | str


class AudioUrl(RequestStruct, frozen=True, kw_only=True):
    """An audio file: a `data:` URL, an http(s) one if the operator allows it, or a file's id."""

    url: str


class AudioContent(IgnoredPartFields, frozen=True, kw_only=True, tag_field="type", tag="audio_url"):
    """Audio in vLLM's format."""

    audio_url: AudioUrl | str


class InputAudioContent(
    IgnoredPartFields, frozen=True, kw_only=True, tag_field="type", tag="input_audio"
):
    """Audio in OpenAI's format."""

    input_audio: AudioData


class InputTextContent(
    IgnoredPartFields, frozen=True, kw_only=True, tag_field="type", tag="input_text"
):
    """Text in the format of the Responses API."""

    text: str


class InputImageContent(
    IgnoredPartFields, frozen=True, kw_only=True, tag_field="type", tag="input_image"
):
    """An image in the format of the Responses API."""

    image_url: str
    detail: Detail = "auto"


class FileField(EchoedStruct, frozen=True, kw_only=True):
    """A file: a `data:` URL of text, an image, a video or audio, or the id of an uploaded image, video or audio."""

    file_data: str | None = None
    file_id: str | None = None


class FileContent(IgnoredPartFields, frozen=True, kw_only=True, tag_field="type", tag="file"):
    """A text file, an image, a video or audio."""

    file: FileField


class ThinkingContent(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str


class RefusalContent(EchoedStruct, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """An earlier refusal of the assistant, made by another server."""

    refusal: str


ContentPart = (
    TextContent
    | ImageContent
    | VideoContent
    | AudioContent
    | InputAudioContent
    | InputTextContent
    | InputImageContent
    | FileContent
    | ThinkingContent
    | RefusalContent
)


class IgnoredMessageFields(EchoedStruct, frozen=True, kw_only=True):
    """Fields of a message without effect."""

    name: Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None = None
    annotations: Ignored = UNSET
    refusal: str | None = None


class ChatMessageParam(IgnoredMessageFields, frozen=True, kw_only=True):
    """A message. Clients send an assistant's message back with all fields of the answer, and with some of their own."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    #: null or missing only in assistant messages
    content: str | Annotated[list[ContentPart], Meta(min_length=1)] | UnsetType | None = UNSET
    #: The assistant's reasoning; some clients name it `reasoning`. Other values than text are ignored.
    reasoning: Ignored = UNSET
    reasoning_content: Ignored = UNSET
    tool_calls: Annotated[list[CallField] | None, doc("Calls of the assistant.")] = None
    #: OpenAI's older format of a call. The message with its result has the role `function` and the function's name.
    function_call: CalledFunction | None = None
    tool_call_id: Annotated[
        Annotated[str, Meta(max_length=MAX_NAME_CHARS)] | None,
        doc("In a tool message: id of the call that it answers."),
    ] = None


MetadataKey = Annotated[str, Meta(max_length=MAX_METADATA_KEY_CHARS)]
MetadataValue = Annotated[str, Meta(max_length=MAX_METADATA_VALUE_CHARS)]
RequestMetadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA_ENTRIES)]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ThinkingType(EchoedStruct, frozen=True, kw_only=True):
    """Whether the model thinks; `auto`: the model's default."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]


class IgnoredFields(StructuredFields, frozen=True, kw_only=True):
    """Fields without effect on answers, logs and metrics."""

    metadata: RequestMetadata | None = None
    store: Ignored = UNSET
    safety_identifier: Ignored = UNSET
    prompt_cache_key: Ignored = UNSET
    prompt_cache_options: Ignored = UNSET
    prompt_cache_retention: Ignored = UNSET
    verbosity: Ignored = UNSET


#: Fields without effect, as listed in docs/api-chat.md.
IGNORED_FIELDS = (
    *IgnoredFields.__annotations__,
    *(f"stream_options.{name}" for name in IgnoredStreamFields.__struct_fields__),
    *(f"messages[].{name}" for name in IgnoredMessageFields.__struct_fields__),
    *(f"messages[].content[].{name}" for name in IgnoredPartFields.__struct_fields__),
    *(f"messages[].content[].image_url.{name}" for name in IgnoredImageFields.__struct_fields__),
)


class ChatCompletionRequest(IgnoredFields, frozen=True, kw_only=True):
    model: ModelName
    messages: Annotated[list[ChatMessageParam], Meta(min_length=1)]
    tools: list[ToolField] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: Annotated[bool | None, doc("false leaves out the model's reasoning.")] = None
    enable_thinking: Annotated[
        bool | None, doc("Whether the model reasons; sets the chat template's variable.")
    ] = None
    thinking: Annotated[bool | ThinkingType | None, doc("The same as `enable_thinking`.")] = None
    chat_template_kwargs: Annotated[
        dict[str, TemplateOption] | None, doc("Variables of the chat template.")
    ] = None
    add_generation_prompt: Annotated[
        bool | None, doc("Whether the prompt ends with the start of an assistant message.")
    ] = None
    continue_final_message: Annotated[
        bool | None, doc("Continue the last message, which must be the assistant's.")
    ] = None
    mm_processor_kwargs: Annotated[
        PixelFields | None, doc("Bounds on the pixels of all images, and of each frame of a video.")
    ] = None
    media_io_kwargs: Annotated[
        MediaFields | None, doc("Frame sampling of videos that have neither fps nor num_frames.")
    ] = None


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    """One entry per token of the content."""

    content: list[ChatLogprob]
    refusal: None = None


class AnswerFunction(msgspec.Struct):
    """The called function; `arguments` are JSON. In a chunk: the delta."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class AnswerCall(msgspec.Struct):
    """A function call. In chunks: `index` and `function`; the first one also has `id` and `type`."""

    function: AnswerFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class AnswerMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[AnswerCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  #: reasoning before the content


class Choice(msgspec.Struct):
    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: CompletionUsage
    system_fingerprint: str
    service_tier: str | UnsetType = UNSET  #: if the request names one
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    timings: Timings = UNSET


class ChoiceDelta(msgspec.Struct):
    """The delta of a choice. The first one has the role; the last one is empty."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  #: before the content
    tool_calls: list[AnswerCall] | UnsetType = UNSET  #: after the content


class ChunkChoice(msgspec.Struct):
    """The delta of one choice in a chunk."""

    index: int
    delta: ChoiceDelta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """A chunk of a streamed response. `usage` is present if the client asks for it."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    service_tier: str | UnsetType = UNSET
    usage: CompletionUsage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET  #: with the first chunk
    timings: Timings = UNSET
