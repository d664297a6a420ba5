"""From OpenAI's chat request to the fleet's tasks: pure, without images' bytes.

Every quantity that a client controls is held against `LimitSettings` here, and every parameter
becomes an exact `SamplingParams` value or an error that names it.
"""

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from gateway.api.chat.schemas import (
    NEUTRAL_VALUES,
    ChatCompletionRequest,
    ChatMessageParam,
    ContentPart,
    ImageContent,
    InputImageContent,
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
    asks_for_something,
    check_neutral,
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
from gateway.api.tools import find_tools, read_call, read_offer
from gateway.calls.surface import Plan
from gateway.http.context import RequestContext
from shared.protocol import Generate, ModelCard, TemplateOption, ToolCall
from shared.settings.limits import LimitSettings

_EMPTY = (b"[]", b"{}", b'""')  #: what answers have in fields that they do not use
_NO_TOOLS = "send tools and tool_choice instead"
_NO_CALLS = "send tool_calls instead, or the turn as text"


class ChatOptions(msgspec.Struct, frozen=True):
    """How the client wants its answer: all that is kept of the request, which may be large."""

    include_usage: bool = False
    continuous_usage: bool = False  #: counts so far in every chunk
    with_logprobs: bool = False
    with_reasoning: bool = True
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
    conversation = translate_messages(request.messages, limits)
    check_model(sampling, card)
    options = _template_options(request, card)
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
            service_tier=find_service_tier(request.service_tier, priority),
        ),
    )


def check_supported(request: ChatCompletionRequest) -> None:
    """Refuse what would change the answer and is not done here. Raises: InvalidRequest."""
    if asks_for_something(request.function_call, NEUTRAL_VALUES["function_call"]):
        raise invalid("function_call", _NO_TOOLS, code="unsupported_parameter")
    check_neutral(request, NEUTRAL_VALUES)


def translate_messages(messages: Sequence[ChatMessageParam], limits: LimitSettings) -> Conversation:
    """The conversation, with images told apart from text. Raises: InvalidRequest."""
    if len(messages) > limits.max_messages:
        raise invalid("messages", f"send at most {limits.max_messages} messages")
    conversation = Conversation()
    for index, message in enumerate(messages):
        _add_message(conversation, message, f"messages.[{index}]")
    conversation.check("messages", limits, f"messages.[{len(messages) - 1}].role")
    return conversation


def _add_message(conversation: Conversation, message: ChatMessageParam, param: str) -> None:
    for name in ("audio", "function_call"):
        if asks_for_something(getattr(message, name), _EMPTY):
            raise invalid(f"{param}.{name}", _NO_CALLS, code="unsupported_parameter")
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if content is msgspec.UNSET and role != "assistant":
        raise missing(f"{param}.content")
    if content is None or content is msgspec.UNSET:
        if role != "assistant":
            raise invalid(f"{param}.content", "send a string or a list of parts")
        content = ""
    if isinstance(content, str):
        parts: tuple[Part, ...] = (conversation.text(content),)
    else:
        parts = tuple(
            _add_part(conversation, part, role, f"{param}.content.[{index}]")
            for index, part in enumerate(content)
        )
    reasoning = _reasoning(message) if role == "assistant" else ""
    calls: tuple[ToolCall, ...] = ()
    if role == "assistant" and message.tool_calls:
        calls = tuple(read_call(call, place) for place, call in enumerate(message.tool_calls))
    conversation.add(role, parts, reasoning, calls, message.tool_call_id or "")


def _reasoning(message: ChatMessageParam) -> str:
    """What an assistant turn was thought before, where the client kept it."""
    for value in (message.reasoning_content, message.reasoning):
        if value is not msgspec.UNSET and memoryview(value)[:1] == b'"':
            with suppress(msgspec.DecodeError):
                return msgspec.json.decode(value, type=str)
    return ""


def _template_options(request: ChatCompletionRequest, card: ModelCard) -> dict[str, TemplateOption]:
    """Variables of the chat template: those given by name, and the switch for thinking."""
    options = find_template_options(card, request.chat_template_kwargs)
    if request.enable_thinking is not None:
        options |= switch_thinking(card, request.enable_thinking, "enable_thinking")
    return options | find_effort(card, request.reasoning_effort, "reasoning_effort")


def _add_part(conversation: Conversation, part: ContentPart, role: Role, param: str) -> Part:
    if not isinstance(part, ImageContent | InputImageContent):
        return conversation.text(part.text)
    url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
    return conversation.image(url, f"{param}.image_url", role)


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
