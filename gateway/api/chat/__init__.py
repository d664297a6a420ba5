"""`POST /v1/chat/completions`: conversations about text and images, as OpenAI defines them.

Source: OpenAI API reference, "Create chat completion" and "Streaming events".
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from msgspec import UNSET

from gateway.api.answers import (
    Blocks,
    ChunkOptions,
    ChunkStream,
    PromptTokens,
    call_id,
    to_usage,
)
from gateway.api.chat.schemas import (
    IGNORED_FIELDS,
    AnswerCall,
    AnswerFunction,
    AnswerMessage,
    AudioContent,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprob,
    ChatMessageParam,
    Choice,
    ChoiceDelta,
    ChoiceLogprobs,
    ChunkChoice,
    ContentPart,
    FileContent,
    FileField,
    ImageContent,
    InputAudioContent,
    InputImageContent,
    PixelFields,
    RefusalContent,
    ThinkingContent,
    ThinkingType,
    TopLogprob,
    VideoContent,
    VideoUrl,
)
from gateway.api.fields import (
    UNSUPPORTED,
    check_model,
    check_most,
    check_stream,
    find_num_logprobs,
    find_priority,
    invalid,
    missing,
    num_choices,
    split_choices,
    timings_of,
    translate_sampling,
    wants_timings,
)
from gateway.api.generation import (
    Conversation,
    Part,
    Role,
    StructuredFields,
    check_arguments,
    check_with_grammar,
    find_effort,
    find_grammar,
    find_template_options,
    find_tools,
    read_call,
    read_offer,
    switch_thinking,
)
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, Plan, Surface, Totals
from gateway.http.exchange import RequestContext
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
    Started,
    TemplateOption,
    TokenLogprob,
    Tokens,
    ToolCall,
    VideoOptions,
)
from shared.settings.limits import LimitSettings

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
        "role": "Supported roles are system, developer, user, assistant, tool and function.",
        "type": "Supported content parts are text, image_url, video_url, audio_url, input_audio, file (of "
        "text, an image, a video or audio) and thinking.",
        "response_format.type": "Supported formats are text, json_object and json_schema.",
        "tool_choice": "Send none, auto, required, a function by name or allowed_tools.",
        "detail": "Supported values are auto, low, high and original.",
        "functions": "Send tools instead.",
        "function_call": "Send tools and tool_choice instead.",
    }

    def read(self, body: bytes, context: RequestContext) -> ChatCompletionRequest:
        request: ChatCompletionRequest = super().read(body, context)
        check_stream(request)
        return request

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
            f"At most {limits.max_text_chars} characters of text and {limits.max_images} images "
            f"together. An image: {MEDIA['image'].formats} of at most {limits.max_image_bytes} bytes, "
            f"{limits.max_image_pixels} pixels, {limits.max_image_side} on a side, and an aspect ratio "
            f"of at most {limits.max_image_aspect:g}:1. At most {limits.max_videos} videos: {MEDIA['video'].formats} "
            f"of at most {limits.max_video_bytes} bytes, {limits.max_video_s:g} seconds, "
            f"{limits.max_frame_pixels} pixels a frame and {limits.max_video_frames} chosen frames. "
            f"At most {limits.max_audios} audio files: {MEDIA['audio'].formats} of at most {limits.max_audio_bytes} bytes "
            f"and {limits.max_audio_s:g} seconds."
        )
        for name in StructuredFields.__annotations__:
            properties[name]["description"] = (
                "Constrains the answer. Send one such field. A schema: at most "
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
    """The tasks of a request, one per choice. Raises: InvalidRequest."""
    priority = find_priority(request.service_tier, context)
    count = num_choices(request, limits)
    sampling = translate_sampling(
        request,
        limits,
        context,
        card.sampling,
        *_max_tokens(request),
        num_logprobs=find_num_logprobs(request.logprobs, request.top_logprobs, limits),
    )
    conversation = translate_messages(request, limits)
    check_model(sampling, card)
    options = _template_options(request, card, context)
    grammar = find_grammar(request, card, limits)
    tools = None
    if request.tools or request.tool_choice is not None:
        asked = read_offer(request.tools, request.tool_choice, request.parallel_tool_calls)
        tools = find_tools(asked, card, limits)
    if grammar is not None or tools is not None:
        check_with_grammar(sampling)
    task = Generate(
        tuple(conversation.messages),
        sampling,
        template_options=options,
        ending=_ending(request, conversation),
        grammar=grammar,
        tools=tools,
    )
    return Plan(
        tasks=split_choices(task, count),
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


def translate_messages(request: ChatCompletionRequest, limits: LimitSettings) -> Conversation:
    """The conversation, with its media in `sources`. Raises: InvalidRequest."""
    messages, conversation = request.messages, Conversation()
    check_most("messages", len(messages), limits.max_messages, "messages")
    translated = _Messages(request, limits, conversation)
    for index, message in enumerate(messages):
        translated.add(message, f"messages.[{index}]")
    conversation.check("messages", limits, f"messages.[{len(messages) - 1}].role")
    return conversation


@dataclass(frozen=True, slots=True)
class _Messages:
    """Adds the messages of a request to a conversation. Raises: InvalidRequest."""

    _request: ChatCompletionRequest
    _limits: LimitSettings
    _conversation: Conversation

    def add(self, message: ChatMessageParam, param: str) -> None:
        conversation, role, content = self._conversation, _ROLES[message.role], message.content
        if content is msgspec.UNSET and role != "assistant":
            raise missing(f"{param}.content")
        if content is None or content is msgspec.UNSET:
            if role not in ("assistant", "tool"):
                raise invalid(f"{param}.content", "send a string or a list of parts")
            content = ""
        reasoning = ""
        if isinstance(content, str):
            parts: tuple[Part, ...] = (conversation.text(content),)
        else:
            thoughts = [part.thinking for part in content if isinstance(part, ThinkingContent)]
            reasoning = "".join(thoughts)
            parts = tuple(
                self._part(part, role, f"{param}.content.[{index}]")
                for index, part in enumerate(content)
                if not isinstance(part, ThinkingContent)
            )
        reasoning = (_reasoning(message) or reasoning) if role == "assistant" else ""
        calls = _calls(message, param) if role == "assistant" else ()
        call_id = message.tool_call_id or ""
        if message.role == "function":
            call_id = message.name or ""
        conversation.add(role, parts or (conversation.text(""),), reasoning, calls, call_id)

    def _part(self, part: ContentPart, role: Role, param: str) -> Part:
        assert not isinstance(part, ThinkingContent)
        conversation = self._conversation
        if isinstance(part, FileContent):
            return self._file(part.file, role, f"{param}.file")
        if isinstance(part, RefusalContent):
            return conversation.text(part.refusal)
        if isinstance(part, InputAudioContent):
            where = f"{param}.input_audio"
            return conversation.medium(
                ImageSource(part.input_audio.url, where, is_audio=True), role
            )
        if isinstance(part, AudioContent):
            audio = part.audio_url
            url = audio if isinstance(audio, str) else audio.url
            return conversation.medium(ImageSource(url, f"{param}.audio_url", is_audio=True), role)
        if isinstance(part, VideoContent):
            return self._video(part.video_url, role, f"{param}.video_url")
        if not isinstance(part, ImageContent | InputImageContent):
            return conversation.text(part.text)
        url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
        bounds = self._bounds(part if isinstance(part, ImageContent) else None, param)
        return conversation.medium(ImageSource(url, f"{param}.image_url", None, *bounds), role)

    def _file(self, file: FileField, role: Role, param: str) -> Part:
        conversation = self._conversation
        if file.file_id is not None:
            where = f"{param}.file_id"
            options = self._options(VideoUrl(url=file.file_id), where)
            source = ImageSource(file.file_id, where, None, *self._bounds(), if_video=options)
            return conversation.medium(source, role)
        data, param = file.file_data or "", f"{param}.file_data"
        media_type, _, encoded = data.partition(";base64,")
        if media_type.startswith("data:image/"):
            return conversation.medium(ImageSource(data, param, None, *self._bounds()), role)
        if media_type.startswith("data:video/"):
            return self._video(data, role, param)
        if media_type.startswith("data:audio/"):
            return conversation.medium(ImageSource(data, param, is_audio=True), role)
        if not media_type.startswith(("data:text/", "data:application/json")):
            raise invalid(param, "send a data: URL of text, an image, a video or audio, in base64")
        try:
            return conversation.text(msgspec.convert(encoded, bytes).decode())
        except (msgspec.ValidationError, UnicodeDecodeError):
            raise invalid(param, "send text in UTF-8, in base64") from None

    def _video(self, given: VideoUrl | str, role: Role, param: str) -> Part:
        video = VideoUrl(url=given) if isinstance(given, str) else given
        options = self._options(video, param)
        source = ImageSource(video.url, param, None, *self._bounds(), options)
        return self._conversation.medium(source, role)

    def _options(self, video: VideoUrl, param: str) -> VideoOptions:
        """Frame options of the part, else of the request."""
        default = self._request.media_io_kwargs
        return video.options(param, self._limits, default and default.video)

    def _bounds(self, own: ImageContent | None = None, param: str = "") -> tuple[int, int]:
        """Minimum and maximum pixels to scale an image to. 0: no bound. `own`: the image's part."""
        given = self._request.mm_processor_kwargs or PixelFields()
        least, most = given.min_pixels, given.max_pixels
        if own is None:
            param = "mm_processor_kwargs"
        else:
            least, most = own.min_pixels or least, own.max_pixels or most
        if least and most and least > most:
            raise invalid(f"{param}.min_pixels", f"send at most max_pixels, which is {most}")
        return least or 0, most or 0


def _calls(message: ChatMessageParam, param: str) -> tuple[ToolCall, ...]:
    calls = tuple(
        read_call(call, place, f"{param}.tool_calls.[{place}]")
        for place, call in enumerate(message.tool_calls or ())
    )
    older = message.function_call
    if older is None or calls:
        return calls
    arguments = check_arguments(older.arguments, f"{param}.function_call.arguments")
    return (ToolCall(older.name, older.name, arguments),)


def _reasoning(message: ChatMessageParam) -> str:
    """The reasoning of an assistant message, if the client sends it."""
    for value in (message.reasoning_content, message.reasoning):
        if value is not msgspec.UNSET and memoryview(value)[:1] == b'"':
            with suppress(msgspec.DecodeError):
                return msgspec.json.decode(value, type=str)
    return ""


def _wants_thinking(request: ChatCompletionRequest) -> bool | None:
    if not isinstance(request.thinking, ThinkingType):
        return request.thinking
    return {"enabled": True, "disabled": False}.get(request.thinking.type)


def _ending(request: ChatCompletionRequest, conversation: Conversation) -> Ending:
    """How the prompt ends: a final assistant message is continued. Raises: InvalidRequest."""
    continues, adds = request.continue_final_message, request.add_generation_prompt
    if continues and adds:
        raise invalid("continue_final_message", "send it or add_generation_prompt, not both")
    if continues and conversation.ending != "message":
        raise invalid("continue_final_message", "the last message must be the assistant's")
    if conversation.ending == "message" and continues is not False and adds is None:
        return "message"
    if continues:
        return "message"
    return "none" if adds is False else "answer"


def _template_options(
    request: ChatCompletionRequest, card: ModelCard, context: RequestContext
) -> dict[str, TemplateOption]:
    """Variables of the chat template: `chat_template_kwargs`, and the switches of thinking."""
    options = find_template_options(card, request.chat_template_kwargs, context)
    for name, wanted in (
        ("thinking", _wants_thinking(request)),
        ("enable_thinking", request.enable_thinking),
    ):
        if wanted is not None:
            options |= switch_thinking(card, wanted, name, context)
    return options | find_effort(card, request.reasoning_effort, "reasoning_effort", context)


def _max_tokens(request: ChatCompletionRequest) -> tuple[int | None, str]:
    """The requested maximum, and its field. Raises: InvalidRequest."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "send it or max_completion_tokens; they differ")
    return (old, "max_tokens") if new is None else (new, "max_completion_tokens")


class ChatAnswer(ChunkStream):
    chunk_type = ChatCompletionChunk

    def __init__(self, options: ChatOptions, head: AnswerHead) -> None:
        super().__init__(options, head)
        self.options = options

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        choices = [
            _GatheredChoice(self.head.id, index, self.options)
            for index in range(len(totals.finished))
        ]
        prompt = PromptTokens()
        for index, event in events:
            choices[index].add(event)
            if index == 0:
                prompt.add(event)
        options = self.options
        return self.encode(
            ChatCompletion,
            [choice.to_choice(index) for index, choice in enumerate(choices)],
            usage=to_usage(totals),
            timings=timings_of(totals),
            prompt_logprobs=prompt.to_prompt_logprobs() if options.with_prompt_logprobs else UNSET,
            prompt_token_ids=prompt.token_ids if options.with_token_ids else UNSET,
        )

    def first_chunk(self, index: int, event: CallEvent) -> bytes:
        token_ids = UNSET
        if isinstance(event, Started) and self.options.with_token_ids:
            token_ids = event.prompt_token_ids
        choice = ChunkChoice(index, ChoiceDelta("assistant", ""))
        return self.chunk(choice, prompt_token_ids=token_ids)

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


class _GatheredChoice:
    def __init__(self, answer_id: str, index: int, options: ChatOptions) -> None:
        self._options = options
        self._blocks = Blocks(answer_id, index, with_thought=options.with_reasoning)
        self._logprobs: list[OutputLogprob] = []
        self._token_ids: list[int] = []
        self._finish_reason = ""

    def add(self, event: object) -> None:
        if isinstance(event, Tokens):
            self._blocks.add(event)
            self._logprobs.extend(event.logprobs)
            self._token_ids.extend(event.token_ids)
        elif isinstance(event, Finished):
            self._finish_reason = event.finish_reason.value

    def to_choice(self, index: int) -> Choice:
        logprobs = None
        if self._options.with_logprobs:
            logprobs = ChoiceLogprobs(to_logprobs(self._logprobs))
        message = AnswerMessage(self._blocks.text)
        if thought := self._blocks.thought:
            message.reasoning_content = thought
        if calls := self._blocks.calls:
            message.content = message.content or None
            message.tool_calls = [
                AnswerCall(AnswerFunction(call.name, call.text), call.call_id, "function")
                for call in calls
            ]
        token_ids = self._token_ids if self._options.with_token_ids else UNSET
        return Choice(index, message, self._finish_reason, logprobs, token_ids)


def to_logprobs(logprobs: Sequence[OutputLogprob]) -> list[ChatLogprob]:
    return [
        ChatLogprob(
            *_to_fields(entry.chosen), [TopLogprob(*_to_fields(rival)) for rival in entry.top]
        )
        for entry in logprobs
    ]


def _to_fields(entry: TokenLogprob) -> tuple[str, float, tuple[int, ...]]:
    return entry.token, entry.logprob, tuple(entry.token_bytes)
