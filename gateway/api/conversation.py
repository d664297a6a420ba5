"""Messages of a conversation in a form common to all APIs: texts, media and function calls."""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

from gateway.api.fields import check_chars, check_most, invalid
from gateway.calls.surface import NoOptions, Plan
from gateway.http.exchange import RequestContext
from gateway.media.loader import ImageSource
from shared.media import MEDIA
from shared.protocol import (
    THINKING_SWITCHES,
    ChatMessage,
    Ending,
    Generate,
    ImagePart,
    ModelCard,
    SamplingParams,
    TemplateOption,
    TextPart,
    Tokenize,
    ToolCall,
    Tools,
)
from shared.settings.limits import LimitSettings

Role = Literal["system", "user", "assistant", "tool"]
Part = TextPart | ImagePart
_MAX_TEMPLATE_OPTIONS = 16
_MAX_OPTION_CHARS = 256


class Conversation(Struct):
    """Messages in the worker's format, and the media that they refer to by index."""

    messages: list[ChatMessage] = field(default_factory=list)
    sources: list[ImageSource] = field(default_factory=list)
    num_chars: int = 0
    ending: Ending = "answer"

    def text(self, text: str) -> TextPart:
        self.num_chars += len(text)
        return TextPart(text)

    def medium(self, source: ImageSource, role: Role) -> ImagePart:
        """The part of an image, video or audio. Raises: InvalidRequest."""
        if role not in ("user", "tool"):
            plural = MEDIA[source.kind].plural
            raise invalid(source.param, f"{plural} are only allowed in user and tool messages")
        self.sources.append(source)
        return ImagePart(len(self.sources) - 1)

    def add(
        self,
        role: Role,
        parts: Sequence[Part],
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
        call_id: str = "",
    ) -> None:
        """Add a message. `reasoning` and `calls`: of the assistant; `call_id`: the call that a tool message answers."""
        self.num_chars += len(reasoning) + sum(len(call.arguments) for call in calls)
        self.messages.append(ChatMessage(role, tuple(parts), reasoning, tuple(calls), call_id))

    def check(self, param: str, limits: LimitSettings, last: str) -> None:
        """Check the length and the last message, which is continued if it is the assistant's. Raises: InvalidRequest.

        `last`: name of the last message's field in errors.
        """
        check_chars(self.num_chars, limits.max_text_chars, param, "context_length_exceeded")
        final = self.messages[-1]
        if final.role != "assistant":
            return
        if final.tool_calls:
            raise invalid(last, "the last message calls tools; send their results after it")
        if any(isinstance(part, TextPart) and part.text.strip() for part in final.parts):
            self.ending = "message"
        elif len(self.messages) > 1:
            self.messages.pop()

    def count(self, options: dict[str, TemplateOption], tools: Tools | None) -> Plan:
        """A plan that counts the tokens. `options`: variables of the chat template."""
        messages, ending = tuple(self.messages), self.ending
        of = Generate(
            messages, SamplingParams(), template_options=options, ending=ending, tools=tools
        )
        return Plan([Tokenize(of, with_ids=False)], NoOptions(), self.sources)


def find_template_options(
    card: ModelCard, given: Mapping[str, TemplateOption] | None, context: RequestContext
) -> dict[str, TemplateOption]:
    """Variables of the chat template that a client sends by name; unknown names are ignored.

    Raises: InvalidRequest.
    """
    if not given:
        return {}
    param = "chat_template_kwargs"
    check_most(param, len(given), _MAX_TEMPLATE_OPTIONS, "entries")
    if any(isinstance(v, str) and len(v) > _MAX_OPTION_CHARS for v in given.values()):
        raise invalid(param, f"send strings of at most {_MAX_OPTION_CHARS} characters")
    options = {name: value for name, value in given.items() if name in card.template_options}
    for name in given.keys() - options.keys():
        if name in THINKING_SWITCHES:
            options |= switch_thinking(card, bool(given[name]), f"{param}.{name}", context)
        else:
            context.ignore(f"{param}.{name}")
    return options


def find_effort(
    card: ModelCard, effort: str | None, param: str, context: RequestContext
) -> dict[str, TemplateOption]:
    """The template variable for the reasoning effort. `param` is the client's field."""
    if effort is None:
        return {}
    if "reasoning_effort" in card.template_options:
        return {"reasoning_effort": effort}
    if card.always_thinks and effort != "none":
        return {}
    return switch_thinking(card, effort != "none", param, context)


def switch_thinking(
    card: ModelCard, wanted: bool, param: str, context: RequestContext
) -> dict[str, TemplateOption]:
    """The template variable that switches thinking. Ignored by models that have no such variable."""
    for name in sorted(THINKING_SWITCHES):
        if name in card.template_options:
            return {name: wanted}
    if wanted is not card.always_thinks:
        context.ignore(param)
    return {}
