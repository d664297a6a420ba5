"""`POST /v1/chat/completions` and `POST /v1/completions`: OpenAI's chat completions with text, images, video and audio,
and OpenAI's text completions.

Fixed limits are part of the types; `translate` checks the limits that an operator can change.

Source: OpenAI API reference, "Create chat completion", "Streaming events", "The chat completion chunk object" and
"Create completion".
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from gateway.api.answers import (
    Blocks,
    ChunkOptions,
    ChunkStream,
    CompletionUsage,
    PromptLogprobs,
    PromptTokens,
    by_choice,
    call_id,
    to_usage,
)
from gateway.api.fields import (
    UNSUPPORTED,
    AudioData,
    CallName,
    Count,
    EchoedStruct,
    Ignored,
    IgnoredStreamFields,
    ModelName,
    Positive,
    RequestStruct,
    SamplingOfFrames,
    Timings,
    TokenId,
    VideoFields,
    check_chars,
    check_model,
    check_most,
    check_stream,
    doc,
    find_num_logprobs,
    find_priority,
    invalid,
    missing,
    split_choices,
    timings_of,
    translate_sampling,
    wants_timings,
)
from gateway.api.generation import (
    CalledFunction,
    CallField,
    Conversation,
    Part,
    Role,
    StructuredFields,
    ToolChoice,
    ToolField,
    check_arguments,
    check_constraints,
    find_effort,
    find_grammar,
    find_template_options,
    find_tools,
    read_calls,
    read_offer,
    switch_thinking,
)
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, Frame, Plan, Surface, Totals
from gateway.http.exchange import RequestContext, sse_event
from gateway.media.loader import ImageSource
from shared.media import MEDIA
from shared.protocol import (
    CallEvent,
    CallPiece,
    Ending,
    Finished,
    Generate,
    ModelCard,
    OutputLogprob,
    PromptLogprob,
    SamplingParams,
    Started,
    TemplateOption,
    TextPart,
    TokenLogprob,
    Tokens,
    TokensPart,
    ToolCall,
    VideoOptions,
)
from shared.settings.limits import (
    MAX_METADATA_ENTRIES,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    LimitSettings,
)

Detail = Literal["auto", "low", "high", "original"]


class IgnoredImageFields(RequestStruct, frozen=True, kw_only=True):
    """Image options without effect: the model's own resolution is used."""

    detail: Detail = "auto"


class ImageUrl(IgnoredImageFields, frozen=True, kw_only=True):
    """An image: a `data:` URL, or an http(s) URL if the operator allows it."""

    url: str


class IgnoredPartFields(RequestStruct, frozen=True, kw_only=True, tag_field="type"):
    """Cache hints that some clients add to content parts. They have no effect."""

    cache_control: Ignored = UNSET
    prompt_cache_breakpoint: Ignored = UNSET


class TextContent(IgnoredPartFields, frozen=True, kw_only=True, tag="text"):
    text: str


PixelCount = Annotated[int, Meta(ge=1, lt=2**31)]


class PixelFields(RequestStruct, frozen=True, kw_only=True):
    """Minimum and maximum pixels of an image or frame after scaling. The model's own limits also apply."""

    min_pixels: PixelCount | None = None
    max_pixels: PixelCount | None = None


class MediaFields(RequestStruct, frozen=True, kw_only=True):
    video: SamplingOfFrames | None = None


class ImageContent(IgnoredPartFields, frozen=True, kw_only=True, tag="image_url"):
    """An image; many clients send the URL as a string."""

    image_url: ImageUrl | str
    min_pixels: Annotated[
        PixelCount | None,
        doc("Minimum pixels to scale the image to; overrides `mm_processor_kwargs`."),
    ] = None
    max_pixels: PixelCount | None = None


class VideoUrl(VideoFields, frozen=True, kw_only=True):
    """A video: a `data:` URL of a file or of JPEG frames, an http(s) URL if the operator allows it, or a file's id."""

    url: str


class VideoContent(IgnoredPartFields, frozen=True, kw_only=True, tag="video_url"):
    video_url: VideoUrl | str


class AudioUrl(RequestStruct, frozen=True, kw_only=True):
    """An audio file: a `data:` URL, an http(s) URL if the operator allows it, or a file's id."""

    url: str


class AudioContent(IgnoredPartFields, frozen=True, kw_only=True, tag="audio_url"):
    """Audio in vLLM's format."""

    audio_url: AudioUrl | str


class InputAudioContent(IgnoredPartFields, frozen=True, kw_only=True, tag="input_audio"):
    """Audio in OpenAI's format."""

    input_audio: AudioData


class InputTextContent(IgnoredPartFields, frozen=True, kw_only=True, tag="input_text"):
    """Text in the format of the Responses API."""

    text: str


class InputImageContent(IgnoredPartFields, frozen=True, kw_only=True, tag="input_image"):
    """An image in the format of the Responses API."""

    image_url: str
    detail: Detail = "auto"


class FileField(EchoedStruct, frozen=True, kw_only=True):
    """A file: a `data:` URL of text, an image, a video or audio, or the id of an uploaded image, video or audio."""

    file_data: str | None = None
    file_id: str | None = None


class FileContent(IgnoredPartFields, frozen=True, kw_only=True, tag="file"):
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
    name: CallName | None = None
    annotations: Ignored = UNSET
    refusal: str | None = None


class ChatMessageParam(IgnoredMessageFields, frozen=True, kw_only=True):
    """A message. Clients can send the message of an answer back with all of its fields; unknown fields are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    #: May be omitted only in assistant messages. May be null only in assistant and tool messages.
    content: str | Annotated[list[ContentPart], Meta(min_length=1)] | UnsetType | None = UNSET
    #: The assistant's reasoning; some clients name it `reasoning`. Values that are not strings are ignored.
    reasoning: Ignored = UNSET
    reasoning_content: Ignored = UNSET
    tool_calls: Annotated[list[CallField] | None, doc("Calls of the assistant.")] = None
    #: OpenAI's older format of a call. The message with its result has the role `function` and the function's name.
    function_call: CalledFunction | None = None
    tool_call_id: Annotated[
        CallName | None, doc("In a tool message: id of the call that it answers.")
    ] = None


MetadataKey = Annotated[str, Meta(max_length=MAX_METADATA_KEY_CHARS)]
MetadataValue = Annotated[str, Meta(max_length=MAX_METADATA_VALUE_CHARS)]
RequestMetadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA_ENTRIES)]


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ThinkingType(EchoedStruct, frozen=True, kw_only=True):
    """Whether the model thinks. `adaptive` and `auto`: the model's default."""

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
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: Annotated[bool | None, doc("false leaves out the model's reasoning.")] = None
    enable_thinking: Annotated[
        bool | None, doc("Whether the model reasons; sets the chat template's switch for it.")
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
        PixelFields | None, doc("Bounds on the pixels of each image, and of each frame of a video.")
    ] = None
    media_io_kwargs: Annotated[
        MediaFields | None, doc("Frame sampling of videos that have neither fps nor num_frames.")
    ] = None


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct):
    """One entry per token of the content."""

    content: list[ChatLogprob]
    refusal: None = None


class AnswerFunction(msgspec.Struct):
    """The called function; `arguments` are JSON, or in a chunk the next piece of it."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class AnswerCall(msgspec.Struct):
    """A function call. Chunks have `index` and `function`; the first chunk of a call also has `id` and `type`."""

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
    token_ids: tuple[int, ...] | UnsetType = UNSET


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
    """The delta of a choice. The first delta has the role; the last delta is empty."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  #: sent before any content
    tool_calls: list[AnswerCall] | UnsetType = UNSET  #: sent after all content


class ChunkChoice(msgspec.Struct):
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


_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class ChatOptions(ChunkOptions, frozen=True):
    with_reasoning: bool = True


class ChatCompletions(Surface):
    """Chat completions about text and images."""

    name = "chat"
    path = "/v1/chat/completions"
    tag = "chat"
    task = "generate"
    id_prefix = "chatcmpl-"
    batchable = True
    options = ChatOptions
    request_type = ChatCompletionRequest
    answer_type = ChatCompletion
    chunk_type = ChatCompletionChunk
    traced = (
        "stream", "max_tokens", "n", "temperature", "top_p", "top_k", "seed", "frequency_penalty",
        "presence_penalty",
    )  # fmt: skip
    unsupported = UNSUPPORTED["/v1/chat/completions"]
    hints: ClassVar = {
        "tool_choice": "Send none, auto, required, a function by name or allowed_tools.",
        "functions": "Send tools instead.",
        "function_call": "Send tools and tool_choice instead.",
        "mm_processor_kwargs.fps": "Send media_io_kwargs.video.fps instead.",
        "mm_processor_kwargs.num_frames": "Send media_io_kwargs.video.num_frames instead.",
    }

    def plan(
        self, request: ChatCompletionRequest, context: RequestContext, card: ModelCard
    ) -> Plan:
        return translate(request, context, card, self.limits)

    def answer(self, options: ChatOptions, head: AnswerHead) -> Answer:
        return ChatAnswer(options, head)

    def describe(self, request: ChatCompletionRequest) -> Mapping[str, Any]:
        max_tokens = request.max_completion_tokens or request.max_tokens
        return {**super().describe(request), "max_tokens": max_tokens}

    def describe_fields(self, properties: dict[str, Any]) -> None:
        limits = self.limits
        properties["messages"]["description"] = (
            f"All messages together: at most {limits.max_text_chars} characters of text and {limits.max_images} "
            f"images. An image: {MEDIA['image'].formats} of at most {limits.max_image_bytes} bytes, "
            f"{limits.max_image_pixels} pixels, {limits.max_image_side} on a side, and an aspect ratio "
            f"of at most {limits.max_image_aspect:g}:1. At most {limits.max_videos} videos: {MEDIA['video'].formats} "
            f"of at most {limits.max_video_bytes} bytes, {limits.max_video_s:g} seconds, "
            f"{limits.max_frame_pixels} pixels a frame and {limits.max_video_frames} chosen frames. "
            f"At most {limits.max_audios} audio files: {MEDIA['audio'].formats} of at most {limits.max_audio_bytes} bytes "
            f"and {limits.max_audio_s:g} seconds."
        )
        for name in StructuredFields.__annotations__:
            properties[name]["description"] = (
                "Constrains the answer. Send at most one such field. A schema: at most "
                f"{limits.max_schema_bytes} bytes, {limits.max_schema_depth} levels and "
                f"{limits.max_schema_values} values; a pattern: {limits.max_pattern_chars} characters; "
                f"choices: {limits.max_choice_texts}; a grammar: {limits.max_grammar_bytes} bytes."
            )
        for name in IGNORED_FIELDS:
            if name in properties:
                properties[name]["description"] = "Accepted, and has no effect."


def translate(
    request: ChatCompletionRequest, context: RequestContext, card: ModelCard, limits: LimitSettings
) -> Plan:
    """The plan of a request, with one task per choice. Raises: InvalidRequest."""
    check_stream(request)
    priority = find_priority(request.service_tier, context)
    count = request.n or 1
    check_most("n", count, limits.max_choices)
    sampling = translate_sampling(
        request,
        limits,
        context,
        card.sampling,
        *_max_tokens(request),
        num_logprobs=find_num_logprobs(request.logprobs, request.top_logprobs, limits),
    )
    conversation = _Messages(request, limits).translate()
    check_model(sampling, card)
    options = _template_options(request, card, context)
    grammar = find_grammar(request, card, limits)
    offer = read_offer(request.tools, request.tool_choice, request.parallel_tool_calls)
    tools = find_tools(offer, card, limits)
    task = Generate(
        tuple(conversation.messages),
        sampling,
        template_options=options,
        ending=_ending(request, conversation),
        grammar=grammar,
        tools=tools,
    )
    return Plan(
        tasks=split_choices(check_constraints(task), count),
        images=conversation.sources,
        is_streamed=bool(request.stream),
        shows_timings=wants_timings(request.timings, context.headers),
        priority=priority,
        options=ChatOptions.of(
            request,
            priority,
            with_logprobs=bool(request.logprobs),
            with_reasoning=request.include_reasoning is not False,
        ),
    )


class _Messages(msgspec.Struct):
    """Translates the messages of a request to a conversation. Raises: InvalidRequest."""

    _request: ChatCompletionRequest
    _limits: LimitSettings
    _conversation: Conversation = msgspec.field(default_factory=Conversation)

    def translate(self) -> Conversation:
        messages, limits = self._request.messages, self._limits
        check_most("messages", len(messages), limits.max_messages, "messages")
        for index, message in enumerate(messages):
            self._add(message, f"messages.[{index}]")
        self._conversation.check("messages", limits, f"messages.[{len(messages) - 1}].role")
        return self._conversation

    def _add(self, message: ChatMessageParam, param: str) -> None:
        conversation, role, content = self._conversation, _ROLES[message.role], message.content
        if content is msgspec.UNSET and role != "assistant":
            raise missing(f"{param}.content")
        if content is None or content is msgspec.UNSET:
            if role not in ("assistant", "tool"):
                raise invalid(f"{param}.content", "send a string or a list of parts")
            content = ""
        given = [TextContent(text=content)] if isinstance(content, str) else content
        thoughts: list[str] = []
        parts: list[Part] = []
        for index, part in enumerate(given):
            if isinstance(part, TextContent):
                parts.append(conversation.text(part.text))
            elif isinstance(part, ThinkingContent):
                thoughts.append(part.thinking)
            else:
                parts.append(self._part(part, role, f"{param}.content.[{index}]"))
        reasoning = (_reasoning(message) or "".join(thoughts)) if role == "assistant" else ""
        calls = _calls(message, param) if role == "assistant" else ()
        call_id = message.tool_call_id or ""
        if message.role == "function":
            call_id = message.name or ""
        conversation.add(role, parts or [conversation.text("")], reasoning, calls, call_id)

    def _part(self, part: ContentPart, role: Role, param: str) -> Part:
        assert not isinstance(part, ThinkingContent | TextContent)
        conversation = self._conversation
        if isinstance(part, FileContent):
            return self._file(part.file, role, f"{param}.file")
        if isinstance(part, RefusalContent):
            return conversation.text(part.refusal)
        if isinstance(part, InputAudioContent):
            audio = ImageSource(part.input_audio.url, f"{param}.input_audio", is_audio=True)
            return conversation.medium(audio, role)
        if isinstance(part, AudioContent):
            url = part.audio_url if isinstance(part.audio_url, str) else part.audio_url.url
            return conversation.medium(ImageSource(url, f"{param}.audio_url", is_audio=True), role)
        if isinstance(part, VideoContent):
            return self._video(part.video_url, role, f"{param}.video_url")
        if not isinstance(part, ImageContent | InputImageContent):
            return conversation.text(part.text)
        url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
        bounds = self._bounds(part if isinstance(part, ImageContent) else None, param)
        return conversation.medium(ImageSource(url, f"{param}.image_url", None, *bounds), role)

    def _file(self, file: FileField, role: Role, param: str) -> Part:
        name = "file_data" if file.file_id is None else "file_id"
        url, param = getattr(file, name) or "", f"{param}.{name}"
        options = self._options(VideoUrl(url=url), param)
        source = ImageSource(url, param, None, *self._bounds(), if_video=options)
        if file.file_id is None:
            return self._conversation.file(source, role)
        return self._conversation.medium(source, role)

    def _video(self, given: VideoUrl | str, role: Role, param: str) -> Part:
        video = VideoUrl(url=given) if isinstance(given, str) else given
        options = self._options(video, param)
        source = ImageSource(video.url, param, None, *self._bounds(), options)
        return self._conversation.medium(source, role)

    def _options(self, video: VideoUrl, param: str) -> VideoOptions:
        """The frame options of the video, else those of the request."""
        default = self._request.media_io_kwargs
        return video.options(param, self._limits, default and default.video)

    def _bounds(self, own: ImageContent | None = None, param: str = "") -> tuple[int, int]:
        """Minimum and maximum pixels after scaling; 0: no bound. `own`: the image's part, which takes precedence."""
        given = self._request.mm_processor_kwargs or PixelFields()
        least, most = given.min_pixels, given.max_pixels
        if own is None:
            param = "mm_processor_kwargs"
        else:
            least, most = own.min_pixels or least, own.max_pixels or most
        if least and most and least > most:
            raise invalid(f"{param}.min_pixels", f"send at most max_pixels, which is {most}")
        return least or 0, most or 0


def _calls(message: ChatMessageParam, param: str) -> list[ToolCall]:
    calls, older = read_calls(message.tool_calls, param), message.function_call
    if older is None or calls:
        return calls
    arguments = check_arguments(older.arguments, f"{param}.function_call.arguments")
    return [ToolCall(older.name, older.name, arguments)]


def _reasoning(message: ChatMessageParam) -> str:
    """The reasoning of an assistant message, if the client sends it."""
    for value in (message.reasoning_content, message.reasoning):
        if value is not msgspec.UNSET and memoryview(value)[:1] == b'"':
            with suppress(msgspec.DecodeError):
                return msgspec.json.decode(value, type=str)
    return ""


def _ending(request: ChatCompletionRequest, conversation: Conversation) -> Ending:
    """How the prompt ends. By default, a final assistant message is continued. Raises: InvalidRequest."""
    continues, adds = request.continue_final_message, request.add_generation_prompt
    if continues and adds:
        raise invalid("continue_final_message", "send it or add_generation_prompt, not both")
    if continues and conversation.ending != "message":
        raise invalid("continue_final_message", "the last message must be the assistant's")
    if continues or (conversation.ending == "message" and continues is None and adds is None):
        return "message"
    return "none" if adds is False else "answer"


def _template_options(
    request: ChatCompletionRequest, card: ModelCard, context: RequestContext
) -> dict[str, TemplateOption]:
    """Variables of the chat template, from `chat_template_kwargs` and the fields that control thinking."""
    options = find_template_options(card, request.chat_template_kwargs, context)
    thinking = request.thinking
    if isinstance(thinking, ThinkingType):
        thinking = {"enabled": True, "disabled": False}.get(thinking.type)
    switches = {"thinking": thinking, "enable_thinking": request.enable_thinking}
    for name, wanted in switches.items():
        if wanted is not None:
            options |= switch_thinking(card, wanted, name, context)
    return options | find_effort(card, request.reasoning_effort, "reasoning_effort", context)


def _max_tokens(request: ChatCompletionRequest) -> tuple[int | None, str]:
    """The requested maximum number of tokens, and the name of its field. Raises: InvalidRequest."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "max_completion_tokens differs; send one of the two")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


class ChatAnswer(ChunkStream[ChatOptions]):
    chunk_type = ChatCompletionChunk

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        options, prompt = self.options, PromptTokens()
        for index, event in events:
            if index == 0:
                prompt.add(event)
        return self.encode(
            ChatCompletion,
            [self._choice(*each) for each in by_choice(events, totals)],
            usage=to_usage(totals),
            timings=timings_of(totals),
            prompt_logprobs=prompt.to_prompt_logprobs() if options.with_prompt_logprobs else UNSET,
            prompt_token_ids=prompt.token_ids if options.with_token_ids else UNSET,
        )

    def _choice(self, index: int, tokens: Tokens, reason: str) -> Choice:
        options = self.options
        blocks = Blocks(self.head.id, index, with_thought=options.with_reasoning)
        blocks.add(tokens)
        message = AnswerMessage(blocks.text)
        if thought := blocks.thought:
            message.reasoning_content = thought
        if calls := blocks.calls:
            message.content = message.content or None
            message.tool_calls = [
                AnswerCall(AnswerFunction(call.name, call.text), call.call_id, "function")
                for call in calls
            ]
        choice = Choice(index, message, reason)
        if options.with_logprobs:
            choice.logprobs = ChoiceLogprobs(to_logprobs(tokens.logprobs))
        if options.with_token_ids:
            choice.token_ids = tokens.token_ids
        return choice

    def first_chunk(self, index: int, event: CallEvent) -> bytes:
        choice = ChunkChoice(index, ChoiceDelta("assistant", ""))
        if not (isinstance(event, Started) and self.options.with_token_ids):
            return self.chunk(choice)
        fields = {"usage": self.usage(), "prompt_token_ids": event.prompt_token_ids}
        return sse_event(self.encode(self.chunk_type, [choice], **fields))

    def empty(self, index: int) -> ChunkChoice:
        return ChunkChoice(index, ChoiceDelta())

    def content(self, index: int, event: Tokens) -> ChunkChoice | None:
        options = self.options
        has_content = (
            event.text
            or event.calls
            or (event.reasoning and options.with_reasoning)
            or (event.logprobs and options.with_logprobs)
            or (event.token_ids and options.with_token_ids)
        )
        if not has_content:
            return None
        logprobs = ChoiceLogprobs(to_logprobs(event.logprobs)) if options.with_logprobs else None
        delta = ChoiceDelta(content=event.text)
        if event.reasoning and options.with_reasoning:
            delta.reasoning_content = event.reasoning
            delta.content = event.text or UNSET
        if event.calls:
            delta.tool_calls = [self._call(index, piece) for piece in event.calls]
            delta.content = event.text or UNSET
        token_ids = event.token_ids if options.with_token_ids else UNSET
        return ChunkChoice(index, delta, logprobs, token_ids=token_ids)

    def _call(self, choice: int, piece: CallPiece) -> AnswerCall:
        """A delta of a call. Only the first delta has id and name."""
        call = AnswerCall(AnswerFunction(arguments=piece.arguments), index=piece.index)
        if piece.name:
            call.id, call.type = call_id(self.head.id, choice, piece.index), "function"
            call.function.name = piece.name
        return call


def to_logprobs(logprobs: Sequence[OutputLogprob]) -> list[ChatLogprob]:
    return [
        ChatLogprob(
            *_to_fields(entry.chosen), [TopLogprob(*_to_fields(rival)) for rival in entry.top]
        )
        for entry in logprobs
    ]


def _to_fields(entry: TokenLogprob) -> tuple[str, float, tuple[int, ...]]:
    return entry.token, entry.logprob, tuple(entry.token_bytes)


DEFAULT_MAX_TOKENS = 16


class CompletionRequest(StructuredFields, frozen=True, kw_only=True):
    model: ModelName
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    #: 0: generate nothing; requires `echo` or `prompt_logprobs`.
    max_tokens: Count | None = None
    echo: Annotated[
        bool | None, doc("Return the prompt before the text; `logprobs` then includes its tokens.")
    ] = None
    logprobs: Annotated[
        Count | None, doc("Return the logprob of each token and of this many alternatives.")
    ] = None
    add_special_tokens: Annotated[
        bool | None, doc("false adds no special tokens, such as BOS, to a prompt.")
    ] = None


class CompletionLogprobs(msgspec.Struct):
    """Text, logprob, alternatives and text offset of each token."""

    tokens: list[str]
    token_logprobs: list[float | None]  #: null for the first token of a prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET  #: in the first chunk of a stream
    token_ids: tuple[int, ...] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole answer or a chunk; both have the same format."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    service_tier: str | UnsetType = UNSET  #: echoed from the request
    usage: CompletionUsage | UnsetType | None = UNSET
    timings: Timings = UNSET


class CompletionOptions(ChunkOptions, frozen=True):
    num_choices: int = 1  #: choices per prompt
    #: The prompts to echo; None for a prompt of token ids.
    echo: tuple[str | None, ...] = ()


class Completions(Surface):
    """Continue a prompt."""

    name = "text_completion"
    path = "/v1/completions"
    tag = "completions"
    task = "generate"
    id_prefix = "cmpl-"
    batchable = True
    options = CompletionOptions
    request_type = CompletionRequest
    answer_type = chunk_type = Completion
    traced = ("stream", "n", "max_tokens", "temperature", "top_p", "top_k", "seed")
    unsupported = UNSUPPORTED["/v1/completions"]
    commas = "max_input_commas"  # a higher limit, because lists of token ids have many commas

    def plan(self, request: CompletionRequest, context: RequestContext, card: ModelCard) -> Plan:
        prompts = _prompts(request)
        count = request.n or 1
        self._check(request, prompts, count)
        most = context.max_output_tokens or DEFAULT_MAX_TOKENS
        default = min(DEFAULT_MAX_TOKENS, most, self.limits.max_output_tokens)
        sampling = translate_sampling(
            request,
            self.limits,
            context,
            card.sampling,
            default if request.max_tokens is None else request.max_tokens,
            num_logprobs=request.logprobs,
        )
        sampling = _with_echo(sampling, request, prompts)
        check_model(sampling, card)
        grammar = find_grammar(request, card, self.limits)
        adds_special = request.add_special_tokens is not False
        made = Generate((), sampling, add_special_tokens=adds_special, grammar=grammar)
        check_constraints(made)
        tasks = [
            task
            for prompt in prompts
            for task in split_choices(replace(made, prompt=prompt), count)
        ]
        priority = find_priority(request.service_tier, context)
        echo = [prompt.text if isinstance(prompt, TextPart) else None for prompt in prompts]
        return Plan(
            tasks,
            CompletionOptions.of(
                request,
                priority,
                num_choices=count,
                echo=tuple(echo) if request.echo else (),
                with_logprobs=request.logprobs is not None,
            ),
            num_prompts=len(prompts),
            is_streamed=bool(request.stream),
            shows_timings=wants_timings(request.timings, context.headers),
            priority=priority,
        )

    def _check(
        self, request: CompletionRequest, prompts: Sequence[TextPart | TokensPart], count: int
    ) -> None:
        limits = self.limits
        check_stream(request)
        if request.max_tokens == 0 and request.prompt_logprobs is None and not request.echo:
            raise invalid("max_tokens", "send at least 1; 0 needs echo or prompt_logprobs")
        check_most("n", count, limits.max_choices)
        check_most("prompt", len(prompts) * count, limits.max_prompts, "choices (prompts times n)")
        num_chars = sum(len(prompt.text) for prompt in prompts if isinstance(prompt, TextPart))
        check_chars(num_chars, limits.max_text_chars, "prompt", "context_length_exceeded")
        check_most("logprobs", request.logprobs or 0, limits.max_top_logprobs)

    def answer(self, options: CompletionOptions, head: AnswerHead) -> Answer:
        return CompletionAnswer(options, head)

    def describe_fields(self, properties: dict[str, Any]) -> None:
        limits = self.limits
        properties["prompt"]["description"] = (
            f"The number of prompts times `n` is at most {limits.max_prompts}. All texts together have at most "
            f"{limits.max_text_chars} characters. Special tokens in a text are encoded as such."
        )


def _with_echo(
    sampling: SamplingParams, request: CompletionRequest, prompts: Sequence[TextPart | TokensPart]
) -> SamplingParams:
    """Request logprobs of the prompt if the echo returns them, or if the prompt is token ids: they contain its text."""
    is_text = isinstance(prompts[0], TextPart)
    if not request.echo or (is_text and request.logprobs is None):
        return sampling
    most = max(request.logprobs or 0, request.prompt_logprobs or 0)
    return replace(sampling, num_prompt_logprobs=most)


def _prompts(request: CompletionRequest) -> list[TextPart | TokensPart]:
    """Raises: InvalidRequest."""
    given = request.prompt
    if isinstance(given, str):
        return [TextPart(given)]
    kinds, prompts = {type(prompt) for prompt in given}, cast(list[Any], given)
    if kinds == {int}:
        return [TokensPart(tuple(prompts))]
    if kinds == {str}:
        return [TextPart(text) for text in prompts]
    if kinds == {list} and all(prompts):
        return [TokensPart(tuple(ids)) for ids in prompts]
    raise invalid("prompt", "send a text, token ids, a list of texts, or a list of lists of ids")


class CompletionAnswer(ChunkStream[CompletionOptions]):
    chunk_type = Completion

    def __init__(self, options: CompletionOptions, head: AnswerHead) -> None:
        super().__init__(options, head)
        self.num_choices = options.num_choices
        self._num_chars: dict[int, int] = {}  # characters of the text so far, by choice
        self._tokens_of_prompt: defaultdict[int, PromptTokens] = defaultdict(PromptTokens)

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        for index, event in events:
            self._tokens_of_prompt[index].add(event)
        choices = [self._choice(*each) for each in by_choice(events, totals)]
        return self.encode(Completion, choices, usage=to_usage(totals), timings=timings_of(totals))

    def _choice(self, index: int, tokens: Tokens, reason: str) -> CompletionChoice:
        choice = self._begin(index)
        choice.finish_reason = reason
        choice.text += tokens.text
        if self.options.with_token_ids:
            choice.token_ids = tokens.token_ids
        logprobs = self._logprobs(index, tokens)
        if choice.logprobs is not None and logprobs is not None:
            for name in CompletionLogprobs.__struct_fields__:
                getattr(choice.logprobs, name).extend(getattr(logprobs, name))
        if self.options.with_prompt_logprobs:
            choice.prompt_logprobs = self._tokens_of_prompt[index].to_prompt_logprobs()
        return choice

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        for index, event in events:
            self._tokens_of_prompt[index].add(event)
        return super().frames(events, totals)

    def can_begin(self, event: CallEvent) -> bool:
        """Whether all tokens of the prompt have arrived. The first chunk of a choice echoes them."""
        if isinstance(event, Tokens):
            return bool(event.num_tokens or event.text)
        return isinstance(event, Finished)

    def first_chunk(self, index: int, event: CallEvent) -> bytes | None:
        first = self._begin(index)
        has_logprobs = first.logprobs is not None and bool(first.logprobs.tokens)
        if first.text or first.token_ids is not UNSET or has_logprobs:
            return self.chunk(first)
        return None

    def empty(self, index: int) -> CompletionChoice:
        return CompletionChoice(index, "")

    def content(self, index: int, event: Tokens) -> CompletionChoice | None:
        if not (event.num_tokens or event.text):
            return None
        choice = CompletionChoice(index, event.text, self._logprobs(index, event))
        if self.options.with_token_ids:
            choice.token_ids = event.token_ids
        has_content = choice.text or choice.token_ids or choice.logprobs is not None
        return choice if has_content else None

    def _begin(self, index: int) -> CompletionChoice:
        """The start of a choice: the echoed prompt, with logprobs of its tokens if requested."""
        choice = CompletionChoice(index, "")
        entries: list[PromptLogprob] = []
        if self.options.echo:
            entries = self._tokens_of_prompt[index].entries
            text = self.options.echo[index // self.options.num_choices]
            spelled = b"".join([entry.chosen.token_bytes for entry in entries])
            choice.text = spelled.decode("utf-8", "replace") if text is None else text
        if self.options.with_logprobs:
            # negative if the tokenizer puts a space before the text
            begin = len(choice.text) - sum(len(entry.chosen.token) for entry in entries)
            choice.logprobs = to_text_logprobs(entries, begin)
        if self.options.with_token_ids:
            choice.prompt_token_ids, choice.token_ids = self._tokens_of_prompt[index].token_ids, ()
        self._num_chars[index] = len(choice.text)
        return choice

    def _logprobs(self, index: int, event: Tokens) -> CompletionLogprobs | None:
        if not self.options.with_logprobs:
            return None
        begin = self._num_chars.get(index, 0)
        self._num_chars[index] = begin + len(event.text)
        return to_text_logprobs(event.logprobs, begin)


def to_text_logprobs(
    entries: Sequence[OutputLogprob | PromptLogprob], begin: int
) -> CompletionLogprobs:
    """The `logprobs` object of tokens. `begin`: text offset of the first token."""
    found = CompletionLogprobs([], [], [], [])
    for entry in entries:
        chosen, offset, has_logprob = entry.chosen, begin, True
        if isinstance(entry, PromptLogprob):
            rivals, has_logprob = [rival for _, rival in entry.top], bool(entry.rank)
            offset = max(begin, 0) if entry.position else 0
        else:
            rivals = [*entry.top]
        top = {rival.token: rival.logprob for rival in rivals} | {chosen.token: chosen.logprob}
        found.tokens.append(chosen.token)
        found.token_logprobs.append(chosen.logprob if has_logprob else None)
        found.top_logprobs.append(top if has_logprob else None)
        found.text_offset.append(offset)
        begin += len(chosen.token)
    return found
