"""Whole answers: the same events as a stream's, gathered."""

from dataclasses import dataclass, field

from gateway.api.chat.answer import AnswerHead, AnswerTotals, to_choice_logprobs
from gateway.api.chat.schemas import AnswerMessage, ChatCompletion, Choice
from shared.protocol import CallEvent, Finished, OutputLogprob, Tokens


@dataclass(slots=True)
class GatheredChoice:
    """One choice's text so far."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[OutputLogprob] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, event: CallEvent) -> None:
        """Take the next event."""
        if isinstance(event, Tokens):
            self.texts.append(event.text)
            self.logprobs.extend(event.logprobs)
        elif isinstance(event, Finished):
            self.finish_reason = event.finish_reason.value


def to_completion(
    head: AnswerHead, choices: list[GatheredChoice], totals: AnswerTotals, *, with_logprobs: bool
) -> ChatCompletion:
    """The answer of a request whose choices have all finished."""
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=[_to_choice(i, choice, with_logprobs) for i, choice in enumerate(choices)],
        usage=totals.usage(),
        service_tier=head.service_tier,
    )


def _to_choice(index: int, gathered: GatheredChoice, with_logprobs: bool) -> Choice:
    logprobs = to_choice_logprobs(gathered.logprobs) if with_logprobs else None
    message = AnswerMessage("".join(gathered.texts))
    return Choice(index, message, gathered.finish_reason, logprobs)
