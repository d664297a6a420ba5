"""From OpenAI's chat request to the fleet's tasks: pure, without images' bytes.

Every quantity that a client controls is held against `LimitSettings` here, and every parameter
becomes an exact `SamplingParams` value or an error that names it.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from gateway.api.chat.schemas import (
    NEUTRAL_VALUES,
    ChatCompletionRequest,
    ChatMessageParam,
    ContentPart,
    ImageContent,
    InputImageContent,
)
from gateway.api.fields import find_priority, invalid
from gateway.calls.surface import Plan
from gateway.http.body import unsupported
from gateway.http.context import RequestContext
from gateway.http.errors import InvalidRequest
from gateway.images.loader import ImageSource
from shared.protocol import (
    THINKING_SWITCHES,
    ChatMessage,
    Generate,
    ImagePart,
    ModelCard,
    Priority,
    SamplingDefaults,
    SamplingParams,
    TemplateOption,
    TextPart,
)
from shared.settings.limits import LimitSettings

_GREEDY_BELOW = 1e-5  #: temperatures under it are greedy: dividing by them would overflow
_LEAST_TOP_P = 1e-9  #: 0 is legal on the wire and means the most probable token alone
_EMPTY = (b"[]", b"{}", b'""')  #: what answers have in fields that they do not use
_MAX_TOKEN_ID_DIGITS = 10
_NO_TOOLS = "no model calls functions here; send auto or none, or leave it out"
_NO_CALLS = "no model calls functions here; send the turn as text"
_MAX_NEUTRAL_BYTES = 256
_MAX_TEMPLATE_OPTIONS = 16
_MAX_OPTION_CHARS = 256
_SEED_MASK = 2**64 - 1  #: negative seeds are the upper half of the fleet's unsigned ones


Number = TypeVar("Number", int, float)


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
    # Of the request's random id, so that nothing here is random.
    seed = int(context.id[:16], 16)
    sampling = translate_sampling(request, limits, seed, card.sampling)
    conversation = translate_messages(request.messages, limits)
    check_model(sampling, card)
    options = translate_template_options(request, card)
    task = Generate(tuple(conversation.messages), sampling, template_options=options)
    wants_timings = context.headers.get(b"x-vlm-timings", b"").lower() in (b"true", b"1")
    stream_options = request.stream_options
    return Plan(
        tasks=split_choices(task, count),
        images=conversation.sources,
        is_streamed=bool(request.stream),
        shows_timings=bool(request.timings) or wants_timings,
        priority=priority,
        options=ChatOptions(
            include_usage=stream_options is not None and stream_options.include_usage,
            continuous_usage=stream_options is not None and stream_options.continuous_usage_stats,
            with_logprobs=bool(request.logprobs),
            with_reasoning=request.include_reasoning is not False,
            service_tier=find_service_tier(request, priority),
        ),
    )


@dataclass(slots=True)
class Conversation:
    """The messages as the worker wants them, and the images in the order of their indexes."""

    messages: list[ChatMessage] = field(default_factory=list)
    sources: list[ImageSource] = field(default_factory=list)
    num_chars: int = 0


def check_supported(request: ChatCompletionRequest) -> None:
    """Refuse what would change the answer and is not done here. Raises: InvalidRequest."""
    for name, neutral in NEUTRAL_VALUES.items():
        value = getattr(request, name)
        if value is not msgspec.UNSET and _asks_for_something(value, neutral):
            if name in ("tool_choice", "function_call"):
                raise invalid(name, _NO_TOOLS, code="unsupported_parameter")
            raise unsupported(name)


def _asks_for_something(value: msgspec.Raw, neutral: tuple[bytes, ...]) -> bool:
    """Whether an unsupported field holds more than null or one of `neutral`, compact JSON."""
    if len(memoryview(value)) > _MAX_NEUTRAL_BYTES:  # nothing is built of what is not small
        return True
    try:
        compact = msgspec.json.encode(msgspec.json.decode(value))
    except msgspec.DecodeError:  # a number out of range
        return True
    return compact not in (b"null", *neutral)


def translate_messages(messages: Sequence[ChatMessageParam], limits: LimitSettings) -> Conversation:
    """The conversation, with images told apart from text. Raises: InvalidRequest."""
    if len(messages) > limits.max_messages:
        raise invalid("messages", f"send at most {limits.max_messages} messages")
    conversation = Conversation()
    for index, message in enumerate(messages):
        _add_message(conversation, message, f"messages.[{index}]")
        if conversation.num_chars > limits.max_text_chars:
            raise InvalidRequest(
                f"The texts are too long: send at most {limits.max_text_chars} characters.",
                param="messages",
                code="context_length_exceeded",
            )
    if messages[-1].role == "assistant":
        raise invalid(
            f"messages.[{len(messages) - 1}].role",
            "the last message must not be the assistant's; end with a user message",
        )
    return conversation


def _add_message(conversation: Conversation, message: ChatMessageParam, param: str) -> None:
    for name in ("audio", "function_call", "tool_calls"):
        value = getattr(message, name)
        if value is not msgspec.UNSET and _asks_for_something(value, _EMPTY):
            raise invalid(f"{param}.{name}", _NO_CALLS, code="unsupported_parameter")
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if content is None:
        if role != "assistant":
            raise invalid(f"{param}.content", "send a string or a list of parts")
        content = ""
    if isinstance(content, str):
        conversation.num_chars += len(content)
        parts: tuple[TextPart | ImagePart, ...] = (TextPart(content),)
    else:
        parts = tuple(
            _add_part(conversation, part, role, f"{param}.content.[{index}]")
            for index, part in enumerate(content)
        )
    reasoning = _reasoning(message) if role == "assistant" else ""
    conversation.num_chars += len(reasoning)
    conversation.messages.append(ChatMessage(role, parts, reasoning))


def _reasoning(message: ChatMessageParam) -> str:
    """What an assistant turn was thought before, where the client kept it."""
    for value in (message.reasoning_content, message.reasoning):
        if value is not msgspec.UNSET and memoryview(value)[:1] == b'"':
            with suppress(msgspec.DecodeError):
                return msgspec.json.decode(value, type=str)
    return ""


def translate_template_options(
    request: ChatCompletionRequest, card: ModelCard
) -> dict[str, TemplateOption]:
    """Variables of the chat template: those given by name, and the switch for thinking.

    Raises: InvalidRequest for what the model's template reads nowhere and would change the answer.
    """
    given = request.chat_template_kwargs or {}
    if len(given) > _MAX_TEMPLATE_OPTIONS:
        raise invalid("chat_template_kwargs", f"send at most {_MAX_TEMPLATE_OPTIONS} entries")
    if any(isinstance(v, str) and len(v) > _MAX_OPTION_CHARS for v in given.values()):
        raise invalid(
            "chat_template_kwargs", f"send strings of at most {_MAX_OPTION_CHARS} characters"
        )
    options = {name: value for name, value in given.items() if name in card.template_options}
    for name in given.keys() - options.keys():
        if name not in THINKING_SWITCHES:
            read = ", ".join(card.template_options) or "none"
            problem = f"this model's chat template reads of such variables: {read}"
            raise invalid("chat_template_kwargs", problem, code="unsupported_parameter")
        options |= _switch_thinking(bool(given[name]), card, "chat_template_kwargs")
    if request.enable_thinking is not None:
        options |= _switch_thinking(request.enable_thinking, card, "enable_thinking")
    effort = request.reasoning_effort
    if effort is not None and "reasoning_effort" in card.template_options:
        options["reasoning_effort"] = effort
    elif effort is not None and not (card.always_thinks and effort != "none"):
        options |= _switch_thinking(effort != "none", card, "reasoning_effort")
    return options


def _switch_thinking(wanted: bool, card: ModelCard, param: str) -> dict[str, TemplateOption]:
    """What makes the model think or not; nothing where it does so anyhow. Raises: InvalidRequest."""
    for name in sorted(THINKING_SWITCHES):
        if name in card.template_options:
            return {name: wanted}
    if wanted is not card.always_thinks:
        does = "thinks always" if card.always_thinks else "has no switch for thinking"
        raise invalid(param, f"this model {does}; leave it out", code="unsupported_parameter")
    return {}


def _add_part(
    conversation: Conversation, part: ContentPart, role: str, param: str
) -> TextPart | ImagePart:
    if not isinstance(part, ImageContent | InputImageContent):
        conversation.num_chars += len(part.text)
        return TextPart(part.text)
    param += ".image_url"
    if role != "user":
        raise invalid(param, "images are only allowed in user messages")
    url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
    conversation.sources.append(ImageSource(url, param))
    return ImagePart(len(conversation.sources) - 1)


def translate_sampling(
    request: ChatCompletionRequest, limits: LimitSettings, seed: int, defaults: SamplingDefaults
) -> SamplingParams:
    """How to sample tokens. `seed` and `defaults` are used where the client says nothing.

    Raises: InvalidRequest.
    """
    temperature = _first(request.temperature, defaults.temperature, 1.0)
    top_p = _first(request.top_p, defaults.top_p, 1.0)
    max_tokens = _max_tokens(request, limits)
    min_tokens = _min_tokens(request, max_tokens, limits)
    if max_tokens is None and defaults.max_tokens is not None:
        max_tokens = min(max(defaults.max_tokens, min_tokens), limits.max_output_tokens)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=max(top_p, _LEAST_TOP_P),
        top_k=max(_first(request.top_k, defaults.top_k, 0), 0),
        min_p=_first(request.min_p, defaults.min_p, 0.0),
        seed=(seed if request.seed is None else request.seed) & _SEED_MASK,
        stop=_stop(request, limits),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request, limits),
        num_logprobs=_num_logprobs(request, limits),
        ignore_eos=bool(request.ignore_eos),
    )


def _first(asked: Number | None, default: Number | None, neutral: Number) -> Number:
    """What the client says, else what the model's makers suggest, else what changes nothing."""
    if asked is not None:
        return asked
    return neutral if default is None else default


def _max_tokens(request: ChatCompletionRequest, limits: LimitSettings) -> int | None:
    """What was asked for; the engine cuts it to what the context holds beside the prompt."""
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", "it differs from max_completion_tokens; send one of the two")
    value, name = (old, "max_tokens") if new is None else (new, "max_completion_tokens")
    if value is not None and value > limits.max_output_tokens:
        raise invalid(name, f"send at most {limits.max_output_tokens}")
    return value


def _min_tokens(
    request: ChatCompletionRequest, max_tokens: int | None, limits: LimitSettings
) -> int:
    value = request.min_tokens or 0
    most = limits.max_output_tokens if max_tokens is None else max_tokens
    if value > most:
        raise invalid("min_tokens", f"send at most {most}, as many as the answer may have")
    return value


def _stop(request: ChatCompletionRequest, limits: LimitSettings) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if len(stop) > limits.max_stop_strings:
        raise invalid("stop", f"send at most {limits.max_stop_strings} strings")
    if any(not 1 <= len(text) <= limits.max_stop_chars for text in stop):
        raise invalid("stop", f"send strings of 1 to {limits.max_stop_chars} characters")
    return stop


def _logit_bias(request: ChatCompletionRequest, limits: LimitSettings) -> dict[int, float]:
    bias = request.logit_bias or {}
    if len(bias) > limits.max_logit_bias:
        raise invalid("logit_bias", f"send at most {limits.max_logit_bias} entries")
    if not all(map(_is_token_id, bias)):
        raise invalid("logit_bias", "send token ids in decimal digits as keys")
    return {int(key): value for key, value in bias.items()}


def _is_token_id(key: str) -> bool:
    return len(key) <= _MAX_TOKEN_ID_DIGITS and key.isascii() and key.isdigit()


def _num_logprobs(request: ChatCompletionRequest, limits: LimitSettings) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise invalid("top_logprobs", "it needs logprobs: send logprobs as true")
        return None
    if (request.top_logprobs or 0) > limits.max_top_logprobs:
        raise invalid("top_logprobs", f"send at most {limits.max_top_logprobs}")
    return request.top_logprobs or 0


def find_service_tier(
    request: ChatCompletionRequest, priority: Priority
) -> str | msgspec.UnsetType:
    """The tier that a request is served as, if it named one."""
    if request.service_tier is None:
        return msgspec.UNSET
    return "flex" if priority is Priority.BATCH else "default"


def num_choices(request: ChatCompletionRequest, limits: LimitSettings) -> int:
    """How many answers to make. Raises: InvalidRequest."""
    count = request.n or 1
    if count > limits.max_choices:
        raise invalid("n", f"send at most {limits.max_choices}")
    return count


def check_stream_options(request: ChatCompletionRequest) -> None:
    """Refuse options of a stream that is not asked for. Raises: InvalidRequest."""
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "it needs stream: send stream as true")


def check_model(sampling: SamplingParams, card: ModelCard) -> None:
    """Refuse what this model cannot do. Raises: InvalidRequest."""
    if any(token_id >= card.vocab_size for token_id in sampling.logit_bias):
        raise invalid("logit_bias", f"send token ids below {card.vocab_size}")


def choice_seed(seed: int, choice: int) -> int:
    """An independent seed for each choice; the first keeps the request's own."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & _SEED_MASK


def split_choices(task: Generate, count: int) -> list[Generate]:
    """One task per choice, that differ in their seeds and share all else."""
    sampling = task.sampling
    return [task] + [
        replace(task, sampling=replace(sampling, seed=choice_seed(sampling.seed, choice)))
        for choice in range(1, count)
    ]
