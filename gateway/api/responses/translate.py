"""From a request of the Responses API to the fleet's task: pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.api.chat.schemas import ChatCompletionRequest
from gateway.api.chat.translate import translate_template_options
from gateway.api.conversation import Conversation
from gateway.api.fields import (
    asks_for_something,
    find_priority,
    find_service_tier,
    invalid,
    wants_timings,
)
from gateway.api.responses.schemas import (
    NEUTRAL_VALUES,
    WITH_LOGPROBS,
    InputImage,
    InputItem,
    InputPart,
    ReasoningText,
    Refusal,
    ResponseFields,
    ResponseRequest,
    SchemaFormat,
    TextConfig,
)
from gateway.api.sampling import SamplingFields, check_max_tokens, seed_of, translate_sampling
from gateway.api.structured import JsonObjectFormat, any_object, check_grammar, schema_grammar
from gateway.calls.surface import Plan
from gateway.http.body import unsupported
from gateway.http.context import RequestContext
from shared.protocol import (
    ChatMessage,
    Generate,
    Grammar,
    ImagePart,
    ImageRef,
    ModelCard,
    SamplingParams,
    TemplateOption,
    TextPart,
)
from shared.settings.limits import LimitSettings


class KeptConversation(msgspec.Struct, frozen=True):
    """What is kept of an answer: the messages up to it, and the response."""

    messages: tuple[ChatMessage, ...]  #: without instructions; the last is the answer
    response: msgspec.Raw

    @property
    def input(self) -> tuple[ChatMessage, ...]:
        """The messages before the answer."""
        return self.messages[:-1]


@dataclass(frozen=True, slots=True)
class Continued:
    """A request, and the conversation from which it goes on."""

    request: Any  #: a `ResponseRequest` or a `CountRequest`
    messages: tuple[ChatMessage, ...]
    images: tuple[ImageRef, ...]

    @property
    def model(self) -> str:
        """The model that is asked for now."""
        return self.request.model

    @property
    def user(self) -> str | None:
        """The client's own name for its user."""
        return self.request.user


class ResponseOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer repeats of its request, and how its client wants it."""

    previous_response_id: str | None = None
    instructions: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    effort: str | None = None
    max_output_tokens: int | None = None
    store: bool = True
    service_tier: str = "default"
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None
    with_logprobs: bool = False
    text: TextConfig = TextConfig()
    #: To be kept with the answer; none where it is not.
    messages: tuple[ChatMessage, ...] = ()


def check_supported(request: ResponseFields) -> None:
    """Refuse what would change the answer and is not done here. Raises: InvalidRequest."""
    for name, neutral in NEUTRAL_VALUES.items():
        if asks_for_something(getattr(request, name, msgspec.UNSET), neutral):
            if name == "tool_choice":
                problem = "no model calls functions here; send auto or none, or leave it out"
                raise invalid(name, problem, code="unsupported_parameter")
            raise unsupported(name)


def translate(
    asked: ResponseRequest | Continued,
    context: RequestContext,
    card: ModelCard,
    limits: LimitSettings,
) -> Plan:
    """One task. Raises: InvalidRequest."""
    request, kept = (asked.request, asked) if isinstance(asked, Continued) else (asked, None)
    priority = find_priority(request.service_tier, context.headers)
    conversation = translate_input(request, limits, kept)
    sampling = _sampling(request, context, card, limits)
    stores = request.store is not False
    task = Generate(
        tuple(conversation.messages),
        sampling,
        template_options=template_options(request, card),
        grammar=_grammar(request, card, limits),
    )
    return Plan(
        [task],
        ResponseOptions(
            previous_response_id=request.previous_response_id,
            instructions=request.instructions,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            top_logprobs=request.top_logprobs or 0,
            effort=None if request.reasoning is None else request.reasoning.effort,
            max_output_tokens=request.max_output_tokens,
            store=stores,
            service_tier=find_service_tier(request.service_tier, priority) or "default",
            metadata=request.metadata or {},
            safety_identifier=request.safety_identifier,
            prompt_cache_key=request.prompt_cache_key,
            user=request.user,
            with_logprobs=sampling.num_logprobs is not None,
            text=request.text or TextConfig(),
            messages=_without_instructions(conversation, request) if stores else (),
        ),
        conversation.sources,
        is_streamed=bool(request.stream),
        shows_timings=wants_timings(request.timings, context.headers),
        priority=priority,
    )


def _without_instructions(
    conversation: Conversation, request: ResponseFields
) -> tuple[ChatMessage, ...]:
    """Those of a request are not those of the next."""
    return tuple(conversation.messages[1:] if request.instructions else conversation.messages)


def _grammar(request: ResponseRequest, card: ModelCard, limits: LimitSettings) -> Grammar | None:
    """What the answer must be; None: any text. Raises: InvalidRequest."""
    match None if request.text is None else request.text.format:
        case JsonObjectFormat():
            grammar = any_object("text.format")
        case SchemaFormat() as wanted:
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
        if num_logprobs > limits.max_top_logprobs:
            raise invalid("top_logprobs", f"send at most {limits.max_top_logprobs}")
    fields = SamplingFields(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        stop=request.stop,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
    )
    return translate_sampling(
        fields,
        limits,
        seed_of(context),
        card.sampling,
        max_tokens=check_max_tokens(request.max_output_tokens, "max_output_tokens", limits),
        num_logprobs=num_logprobs,
    )


def template_options(request: ResponseFields, card: ModelCard) -> dict[str, TemplateOption]:
    """The switch for thinking. Raises: InvalidRequest."""
    if request.reasoning is None or request.reasoning.effort is None:
        return {}
    wish = ChatCompletionRequest(
        model=request.model, messages=[], reasoning_effort=request.reasoning.effort
    )
    return translate_template_options(wish, card)


def translate_input(
    request: ResponseFields, limits: LimitSettings, kept: Continued | None = None
) -> Conversation:
    """Instructions, what was kept, and input as messages. Raises: InvalidRequest."""
    conversation = Conversation()
    if request.instructions:
        part = conversation.text(request.instructions)
        conversation.messages.append(ChatMessage("system", (part,)))
    if kept is not None:
        _go_on(conversation, kept)
    if isinstance(request.input, str):
        conversation.messages.append(ChatMessage("user", (conversation.text(request.input),)))
    else:
        _add_items(conversation, request.input, limits)
    if len(conversation.messages) > limits.max_messages:
        raise invalid(
            "input", f"send at most {limits.max_messages} messages, earlier ones included"
        )
    conversation.check_chars("input", limits)
    if conversation.messages[-1].role == "assistant":
        raise invalid("input", "the last message must not be the assistant's; end with a user's")
    return conversation


def _go_on(conversation: Conversation, kept: Continued) -> None:
    """The messages of an earlier answer, whose images are kept too."""
    for message in kept.messages:
        parts = tuple(
            conversation.text(part.text)
            if isinstance(part, TextPart)
            else conversation.kept_image(kept.images[part.image], "previous_response_id")
            for part in message.parts
        )
        conversation.num_chars += len(message.reasoning)
        conversation.messages.append(ChatMessage(message.role, parts, message.reasoning))


def _add_items(
    conversation: Conversation, items: Sequence[InputItem], limits: LimitSettings
) -> None:
    if len(items) > limits.max_messages:
        raise invalid("input", f"send at most {limits.max_messages} items")
    thought = ""
    for index, item in enumerate(items):
        param = f"input.[{index}]"
        content = item.content if item.content is not None else []
        if item.type == "reasoning":
            thought = _thought(content)
            continue
        if item.role is None:
            raise invalid(f"{param}.role", "send system, developer, user or assistant")
        if isinstance(content, str):
            parts: tuple[TextPart | ImagePart, ...] = (conversation.text(content),)
        else:
            parts = tuple(
                _add_part(conversation, part, item.role, f"{param}.content.[{place}]")
                for place, part in enumerate(content)
            )
        role = "system" if item.role == "developer" else item.role
        reasoning = thought if role == "assistant" else ""
        conversation.num_chars += len(reasoning)
        conversation.messages.append(ChatMessage(role, parts, reasoning))
        thought = ""
    if not conversation.messages:
        raise invalid("input", "send at least one message")


def _thought(content: str | Sequence[InputPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, ReasoningText))


def _add_part(
    conversation: Conversation, part: InputPart, role: str, param: str
) -> TextPart | ImagePart:
    if isinstance(part, Refusal):
        return conversation.text(part.refusal)
    if not isinstance(part, InputImage):
        return conversation.text(part.text)
    if part.image_url is None:
        raise invalid(f"{param}.image_url", "send the image as a data: URL in base64")
    if role != "user":
        raise invalid(f"{param}.image_url", "images are only allowed in user messages")
    return conversation.image(part.image_url, f"{param}.image_url")
