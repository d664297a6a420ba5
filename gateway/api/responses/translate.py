"""Translates requests of the Responses API to tasks, without side effects."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.api.chat.schemas import RefusalContent
from gateway.api.fields import (
    check_most,
    find_priority,
    find_service_tier,
    invalid,
    missing,
    translate_sampling,
    wants_timings,
)
from gateway.api.generation import (
    Conversation,
    FunctionField,
    JsonObjectFormat,
    Offer,
    Part,
    Role,
    any_object,
    check_arguments,
    check_grammar,
    find_effort,
    find_tools,
    schema_grammar,
)
from gateway.api.responses.schemas import (
    CALL_ITEMS,
    HOSTED_ITEMS,
    WITH_LOGPROBS,
    InputAudio,
    InputFile,
    InputImage,
    InputItem,
    InputPart,
    InputVideo,
    ReasoningText,
    ResponseChoice,
    ResponseFields,
    ResponseFormat,
    ResponseObject,
    ResponseRequest,
    ResponseTool,
    ResponseToolChoice,
    ShownReasoning,
    ShownText,
    ShownTool,
)
from gateway.calls.surface import Plan
from gateway.http.errors import NotFound
from gateway.http.exchange import RequestContext
from gateway.media.loader import ImageSource
from shared.protocol import (
    ChatMessage,
    Generate,
    Grammar,
    ImageRef,
    ModelCard,
    SamplingParams,
    TemplateOption,
    TextPart,
    ToolCall,
    Tools,
)
from shared.settings.limits import LimitSettings


class KeptConversation(msgspec.Struct, frozen=True):
    """A stored answer: the messages up to it, and the response."""

    messages: tuple[ChatMessage, ...]  #: without instructions; the last message is the answer
    response: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Continued:
    """A request, and the conversation that it continues."""

    request: Any  #: a `ResponseRequest` or a `CountRequest`
    messages: tuple[ChatMessage, ...]
    images: tuple[ImageRef, ...]


class ResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    response: ResponseObject  #: with the fields that repeat the request
    with_logprobs: bool = False
    #: Stored with the answer; empty if it is not stored.
    messages: tuple[ChatMessage, ...] = ()


def translate(
    asked: ResponseRequest | Continued,
    context: RequestContext,
    card: ModelCard,
    limits: LimitSettings,
) -> Plan:
    """The task of a request. Raises: InvalidRequest."""
    request, kept = (asked.request, asked) if isinstance(asked, Continued) else (asked, None)
    priority = find_priority(request.service_tier, context)
    conversation = translate_input(request, limits, kept)
    if request.truncation == "auto":
        context.ignore("truncation")
    sampling = _sampling(request, context, card, limits)
    # the instructions of a request do not apply to the next one
    kept_messages = conversation.messages[1 if request.instructions else 0 :]
    task = Generate(
        tuple(conversation.messages),
        sampling,
        template_options=template_options(request, card, context),
        ending=conversation.ending,
        grammar=_grammar(request, card, limits),
        tools=tools_of(request, card, limits),
    )
    return Plan(
        [task],
        ResponseOptions(
            response=_echo(request, sampling, find_service_tier(request.service_tier, priority)),
            with_logprobs=sampling.num_logprobs is not None,
            messages=() if request.store is False else tuple(kept_messages),
        ),
        conversation.sources,
        is_streamed=bool(request.stream),
        shows_timings=wants_timings(request.timings, context.headers),
        priority=priority,
    )


def _echo(
    request: ResponseRequest, sampling: SamplingParams, service_tier: str | msgspec.UnsetType
) -> ResponseObject:
    """Fields of the response that repeat the request."""
    effort = None if request.reasoning is None else request.reasoning.effort
    form = None if request.text is None else request.text.format
    return ResponseObject(
        previous_response_id=request.previous_response_id,
        instructions=request.instructions,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        top_logprobs=request.top_logprobs or 0,
        reasoning=ShownReasoning(effort),
        max_output_tokens=request.max_output_tokens,
        store=request.store is not False,
        service_tier=service_tier or "default",
        metadata=request.metadata or {},
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key,
        user=request.user,
        text=ShownText() if form is None else ShownText(form),
        tools=[*map(_show_tool, filter(_is_function, request.tools or ()))],
        tool_choice=_word_of(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls is not False,
    )


def _grammar(request: ResponseRequest, card: ModelCard, limits: LimitSettings) -> Grammar | None:
    """The grammar of the answer; None: any text. Raises: InvalidRequest."""
    match None if request.text is None else request.text.format:
        case JsonObjectFormat():
            grammar = any_object("text.format")
        case ResponseFormat() as wanted:
            schema = bytes(wanted.schema)
            grammar = schema_grammar(schema, "text.format.schema", limits, strict=wanted.strict)
        case _:
            return None
    check_grammar(grammar, card)
    return grammar


def _sampling(
    request: ResponseRequest, context: RequestContext, card: ModelCard, limits: LimitSettings
) -> SamplingParams:
    """Raises: InvalidRequest."""
    num_logprobs = None
    if request.top_logprobs or WITH_LOGPROBS in (request.include or ()):
        num_logprobs = request.top_logprobs or 0
        check_most("top_logprobs", num_logprobs, limits.max_top_logprobs)
    return translate_sampling(
        request,
        limits,
        context,
        card.sampling,
        request.max_output_tokens,
        "max_output_tokens",
        num_logprobs=num_logprobs,
    )


def template_options(
    request: ResponseFields, card: ModelCard, context: RequestContext
) -> dict[str, TemplateOption]:
    """The template variables for the reasoning effort."""
    effort = None if request.reasoning is None else request.reasoning.effort
    return find_effort(card, effort, "reasoning.effort", context)


def _is_function(tool: ResponseTool) -> bool:
    return tool.type == "function"


def _show_tool(tool: ResponseTool) -> ShownTool:
    schema = None if tool.parameters is msgspec.UNSET else tool.parameters.copy()
    return ShownTool(tool.name or "", tool.description, schema, tool.strict)


def _word_of(choice: ResponseToolChoice | None) -> ResponseToolChoice:
    """The choice as a string, if it names no function."""
    if choice is None:
        return "auto"
    if isinstance(choice, ResponseChoice) and choice.type not in ("function", "allowed_tools"):
        return choice.type
    return choice


def tools_of(request: ResponseFields, card: ModelCard, limits: LimitSettings) -> Tools | None:
    """The functions that the model may or must call. None: no functions. Raises: InvalidRequest."""
    if not request.tools and request.tool_choice is None:
        return None
    functions: list[tuple[str, FunctionField]] = []
    for index, tool in enumerate(request.tools or ()):
        if not _is_function(tool):
            continue
        if tool.name is None:
            raise missing(f"tools.[{index}].name")
        field = FunctionField(tool.name, tool.description, tool.parameters, tool.strict)
        functions.append((f"tools.[{index}]", field))
    choice, names = _word_of(request.tool_choice), None
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
    request: ResponseFields, limits: LimitSettings, kept: Continued | None = None
) -> Conversation:
    """Instructions, stored messages and input as one conversation. Raises: InvalidRequest."""
    conversation = Conversation()
    if request.instructions:
        conversation.add("system", [conversation.text(request.instructions)])
    if kept is not None:
        _go_on(conversation, kept)
    if isinstance(request.input, str):
        conversation.add("user", [conversation.text(request.input)])
    else:
        _Items(conversation, limits).add(request.input)
    if len(conversation.messages) > limits.max_messages:
        raise invalid(
            "input", f"send at most {limits.max_messages} messages, earlier ones included"
        )
    conversation.check("input", limits, "input")
    return conversation


def _go_on(conversation: Conversation, kept: Continued) -> None:
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
            raise NotFound(
                "Items are not stored: send the item itself.",
                param=f"{param}.id",
                code="item_not_found",
            )
        elif item.type != "message":
            self._end_turn()
            is_shell = item.type == "local_shell_call_output"  # its `id` is the call's
            call_id = item.call_id or (item.id if is_shell else None)
            if call_id is None:
                raise missing(f"{param}.call_id")
            if item.output is None:
                raise missing(f"{param}.output")
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
        """Complete the assistant's message, if there is one."""
        if self._said or self._calls:
            parts = self._said or [self._conversation.text("")]
            self._conversation.add("assistant", parts, self._thought, self._calls)
            self._said, self._calls, self._thought = [], [], ""

    def _parts(self, content: str | Sequence[InputPart], role: Role, param: str) -> list[Part]:
        if isinstance(content, str):
            return [self._conversation.text(content)]
        return [self._part(part, role, f"{param}.[{place}]") for place, part in enumerate(content)]

    def _part(self, part: InputPart, role: Role, param: str) -> Part:
        if isinstance(part, RefusalContent):
            return self._conversation.text(part.refusal)
        if isinstance(part, InputFile):
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
