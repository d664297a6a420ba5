"""Messages on their way to the fleet, whatever an API calls them: texts, images told apart, and calls."""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct, field

from gateway.api.fields import invalid
from gateway.http.errors import InvalidRequest
from gateway.images.loader import ImageSource
from shared.protocol import (
    THINKING_SWITCHES,
    ChatMessage,
    ImagePart,
    ImageRef,
    ModelCard,
    TemplateOption,
    TextPart,
    ToolCall,
)
from shared.settings.limits import LimitSettings

Role = Literal["system", "user", "assistant", "tool"]
Part = TextPart | ImagePart
_MAX_TEMPLATE_OPTIONS = 16
_MAX_OPTION_CHARS = 256


class Conversation(Struct):
    """The messages as the worker wants them, and the images in the order of their indexes."""

    messages: list[ChatMessage] = field(default_factory=list)
    sources: list[ImageSource] = field(default_factory=list)
    num_chars: int = 0

    def text(self, text: str) -> TextPart:
        """The part of a text."""
        self.num_chars += len(text)
        return TextPart(text)

    def image(self, url: str, param: str, role: Role = "user") -> ImagePart:
        """The part of an image. `param` names its place in the request. Raises: InvalidRequest."""
        if role not in ("user", "tool"):
            raise invalid(param, "images are only allowed in user and tool messages")
        self.sources.append(ImageSource(url, param))
        return ImagePart(len(self.sources) - 1)

    def kept_image(self, ref: ImageRef, param: str) -> ImagePart:
        """The part of an image that an earlier request brought."""
        self.sources.append(ImageSource("", param, ref))
        return ImagePart(len(self.sources) - 1)

    def add(
        self,
        role: Role,
        parts: Sequence[Part],
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
        call_id: str = "",
    ) -> None:
        """A turn. `reasoning` and `calls` are the assistant's; `call_id` is of the call that a tool answers."""
        self.num_chars += len(reasoning) + sum(len(call.arguments) for call in calls)
        self.messages.append(ChatMessage(role, tuple(parts), reasoning, tuple(calls), call_id))

    def check(self, param: str, limits: LimitSettings, last: str) -> None:
        """Raises: InvalidRequest if it is too long, or ends with the assistant's turn.

        `last` names the place of the last turn.
        """
        check_text_chars(self.num_chars, param, limits)
        if self.messages[-1].role == "assistant":
            raise invalid(
                last, "the last message must not be the assistant's; end with a user message"
            )


def check_text_chars(num_chars: int, param: str, limits: LimitSettings) -> None:
    """Raises: InvalidRequest if the texts of a prompt are too long."""
    if num_chars > limits.max_text_chars:
        raise InvalidRequest(
            f"The texts are too long: send at most {limits.max_text_chars} characters.",
            param=param,
            code="context_length_exceeded",
        )


def find_template_options(
    card: ModelCard, given: Mapping[str, TemplateOption] | None
) -> dict[str, TemplateOption]:
    """Variables of the chat template that a client gives by name.

    Raises: InvalidRequest for what the model's template reads nowhere and would change the answer.
    """
    if not given:
        return {}
    param = "chat_template_kwargs"
    if len(given) > _MAX_TEMPLATE_OPTIONS:
        raise invalid(param, f"send at most {_MAX_TEMPLATE_OPTIONS} entries")
    if any(isinstance(v, str) and len(v) > _MAX_OPTION_CHARS for v in given.values()):
        raise invalid(param, f"send strings of at most {_MAX_OPTION_CHARS} characters")
    options = {name: value for name, value in given.items() if name in card.template_options}
    for name in given.keys() - options.keys():
        if name not in THINKING_SWITCHES:
            read = ", ".join(card.template_options) or "none"
            problem = f"this model's chat template reads of such variables: {read}"
            raise invalid(param, problem, code="unsupported_parameter")
        options |= switch_thinking(card, bool(given[name]), param)
    return options


def find_effort(card: ModelCard, effort: str | None, param: str) -> dict[str, TemplateOption]:
    """The variable for how much to think. `param` is the client's name of it. Raises: InvalidRequest."""
    if effort is None:
        return {}
    if "reasoning_effort" in card.template_options:
        return {"reasoning_effort": effort}
    if card.always_thinks and effort != "none":
        return {}
    return switch_thinking(card, effort != "none", param)


def switch_thinking(card: ModelCard, wanted: bool, param: str) -> dict[str, TemplateOption]:
    """What makes the model think or not; nothing where it does so anyhow. Raises: InvalidRequest."""
    for name in sorted(THINKING_SWITCHES):
        if name in card.template_options:
            return {name: wanted}
    if wanted is not card.always_thinks:
        does = "thinks always" if card.always_thinks else "has no switch for thinking"
        raise invalid(param, f"this model {does}; leave it out", code="unsupported_parameter")
    return {}
