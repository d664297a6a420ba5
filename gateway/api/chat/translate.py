"""From OpenAI's chat request to the fleet's tasks: pure, without images' bytes.

Every quantity that a client controls is held against `LimitSettings` here, and every parameter
becomes an exact `SamplingParams` value or an error that names it.
"""

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from gateway.api.chat.schemas import (
    ChatCompletionRequest,
    ChatMessageParam,
    ContentPart,
    FileContent,
    FileField,
    ImageContent,
    InputImageContent,
    PixelFields,
    ThinkingContent,
    ThinkingType,
)
from gateway.api.conversation import (
    Conversation,
    Part,
    Role,
    find_effort,
    find_template_options,
    switch_thinking,
)
from gateway.api.fields import (
    find_priority,
    find_service_tier,
    invalid,
    missing,
    wants_timings,
)
from gateway.api.sampling import (
    check_max_tokens,
    check_model,
    num_choices,
    seed_of,
    split_choices,
    translate_sampling,
)
from gateway.api.structured import check_with_grammar, find_grammar
from gateway.api.tools import check_arguments, find_tools, read_call, read_offer
from gateway.calls.surface import Plan
from gateway.http.exchange import RequestContext
from shared.protocol import Ending, Generate, ModelCard, TemplateOption, ToolCall
from shared.settings.limits import LimitSettings

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class ChatOptions(msgspec.Struct, frozen=True):
    """How the client wants its answer: all that is kept of the request, which may be large."""

    include_usage: bool = False
    continuous_usage: bool = False  #: counts so far in every chunk
    with_logprobs: bool = False
    with_reasoning: bool = True
    with_prompt_logprobs: bool = False
    with_token_ids: bool = False
    #: That it is served as, where the request named one.
    service_tier: str | msgspec.UnsetType = msgspec.UNSET


def translate(
    request: ChatCompletionRequest, context: RequestContext, card: ModelCard, limits: LimitSettings
) -> Plan:
    """The tasks of a request, one for each choice. Raises: InvalidRequest."""
    priority = find_priority(request.service_tier, context.headers)
    count = num_choices(request, limits)
    sampling = translate_sampling(
        request,
        limits,
        seed_of(context),
        card.sampling,
        max_tokens=_max_tokens(request, limits),
        num_logprobs=_num_logprobs(request, limits),
    )
    conversation = translate_messages(
        request.messages, limits, request.mm_processor_kwargs or PixelFields()
    )
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
    stream_options = request.stream_options
    return Plan(
        tasks=split_choices(task, count),
        images=conversation.sources,
        is_streamed=bool(request.stream),
        shows_timings=wants_timings(request.timings, context.headers),
        priority=priority,
        options=ChatOptions(
            include_usage=stream_options is not None and stream_options.include_usage,
            continuous_usage=stream_options is not None and stream_options.continuous_usage_stats,
            with_logprobs=bool(request.logprobs),
            with_reasoning=request.include_reasoning is not False,
            with_prompt_logprobs=request.prompt_logprobs is not None,
            with_token_ids=bool(request.return_token_ids),
            service_tier=find_service_tier(request.service_tier, priority),
        ),
    )


def translate_messages(
    messages: Sequence[ChatMessageParam], limits: LimitSettings, pixels: PixelFields
) -> Conversation:
    """The conversation, with images told apart from text. Raises: InvalidRequest."""
    if len(messages) > limits.max_messages:
        raise invalid("messages", f"send at most {limits.max_messages} messages")
    conversation = Conversation()
    for index, message in enumerate(messages):
        _add_message(conversation, message, f"messages.[{index}]", pixels)
    conversation.check("messages", limits, f"messages.[{len(messages) - 1}].role")
    return conversation


def _add_message(
    conversation: Conversation, message: ChatMessageParam, param: str, pixels: PixelFields
) -> None:
    role = _ROLES[message.role]
    content = message.content
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
            _add_part(conversation, part, role, f"{param}.content.[{index}]", pixels)
            for index, part in enumerate(content)
            if not isinstance(part, ThinkingContent)
        )
    reasoning = (_reasoning(message) or reasoning) if role == "assistant" else ""
    calls = _calls(message, param) if role == "assistant" else ()
    call_id = message.tool_call_id or ""
    if message.role == "function":
        call_id = message.name or ""
    conversation.add(role, parts or (conversation.text(""),), reasoning, calls, call_id)


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
    """What an assistant turn was thought before, where the client kept it."""
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
    """How the prompt ends; an assistant's last message is continued. Raises: InvalidRequest."""
    continues, adds = request.continue_final_message, request.add_generation_prompt
    if continues and adds:
        raise invalid("continue_final_message", "it excludes add_generation_prompt; send one")
    if continues and conversation.ending != "message":
        raise invalid("continue_final_message", "end with a message of the assistant")
    if conversation.ending == "message" and continues is not False and adds is None:
        return "message"
    if continues:
        return "message"
    return "none" if adds is False else "answer"


def _template_options(
    request: ChatCompletionRequest, card: ModelCard, context: RequestContext
) -> dict[str, TemplateOption]:
    """Variables of the chat template: those given by name, and the switch for thinking."""
    options = find_template_options(card, request.chat_template_kwargs, context)
    for name, wanted in (
        ("thinking", _wants_thinking(request)),
        ("enable_thinking", request.enable_thinking),
    ):
        if wanted is not None:
            options |= switch_thinking(card, wanted, name, context)
    return options | find_effort(card, request.reasoning_effort, "reasoning_effort", context)


def _add_file(conversation: Conversation, file: FileField, role: Role, param: str) -> Part:
    """Raises: InvalidRequest."""
    if file.file_id is not None:
        return conversation.image(file.file_id, f"{param}.file_id", role)
    data = file.file_data or ""
    media_type, _, encoded = data.partition(";base64,")
    if media_type.startswith("data:image/"):
        return conversation.image(data, f"{param}.file_data", role)
    if not media_type.startswith(("data:text/", "data:application/json")):
        raise invalid(f"{param}.file_data", "send a data: URL of text or of an image, in base64")
    try:
        return conversation.text(msgspec.convert(encoded, bytes).decode())
    except (msgspec.ValidationError, UnicodeDecodeError):
        raise invalid(f"{param}.file_data", "send text in UTF-8, in base64") from None


def _add_part(
    conversation: Conversation, part: ContentPart, role: Role, param: str, pixels: PixelFields
) -> Part:
    assert not isinstance(part, ThinkingContent)
    if isinstance(part, FileContent):
        return _add_file(conversation, part.file, role, f"{param}.file")
    if not isinstance(part, ImageContent | InputImageContent):
        return conversation.text(part.text)
    url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
    least, most = pixels.min_pixels, pixels.max_pixels
    if isinstance(part, ImageContent):
        least, most = part.min_pixels or least, part.max_pixels or most
    if least and most and least > most:
        raise invalid(f"{param}.min_pixels", f"send at most max_pixels, which is {most}")
    return conversation.image(url, f"{param}.image_url", role, (least or 0, most or 0))


def _max_tokens(request: ChatCompletionRequest, limits: LimitSettings) -> int | None:
    """What was asked for; the engine cuts it to what the context holds beside the prompt."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "it differs from max_completion_tokens; send one of the two")
    value, name = (old, "max_tokens") if new is None else (new, "max_completion_tokens")
    return check_max_tokens(value, name, limits)


def _num_logprobs(request: ChatCompletionRequest, limits: LimitSettings) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise invalid("top_logprobs", "it needs logprobs: send logprobs as true")
        return None
    if (request.top_logprobs or 0) > limits.max_top_logprobs:
        raise invalid("top_logprobs", f"send at most {limits.max_top_logprobs}")
    return request.top_logprobs or 0
