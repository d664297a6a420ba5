"""From the fleet's events to OpenAI's words: what whole answers and streams have in common.

Pure but for nothing: it reads no clock and writes no socket.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from gateway.api.chat.schemas import (
    ChatLogprob,
    ChoiceLogprobs,
    CompletionUsage,
    PromptTokensDetails,
    TopLogprob,
)
from shared.protocol import (
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    OutputLogprob,
    StageTimings,
    TokenLogprob,
    Usage,
)


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every piece of one answer repeats."""

    id: str
    created: int  #: epoch seconds
    model: str
    system_fingerprint: str
    service_tier: str | UnsetType = UNSET


@dataclass(slots=True)
class AnswerTotals:
    """The sums over the choices of one request: the prompt counts once."""

    finished: list[Finished] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(event.usage.num_output_tokens for event in self.finished)

    @property
    def prompt(self) -> Usage:
        """The prompt's counts."""
        return self.finished[0].usage

    @property
    def timings(self) -> list[StageTimings]:
        """Each choice's stages."""
        return [event.timings for event in self.finished]

    def usage(self) -> CompletionUsage:
        """The `usage` object."""
        prompt, num_output = self.prompt, self.num_output_tokens
        return CompletionUsage(
            prompt_tokens=prompt.num_prompt_tokens,
            completion_tokens=num_output,
            total_tokens=prompt.num_prompt_tokens + num_output,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=prompt.num_cached_tokens,
                image_tokens=prompt.num_image_tokens,
                text_tokens=prompt.num_prompt_tokens - prompt.num_image_tokens,
            ),
        )


def check_finished(event: Finished) -> Failed | None:
    """An aborted answer is no answer: the failure that it stands for."""
    if event.finish_reason is not FinishReason.ABORT:
        return None
    message = "The request was cancelled."
    return Failed(event.request_id, event.attempt, ErrorCode.CANCELLED, message)


def to_choice_logprobs(logprobs: Sequence[OutputLogprob]) -> ChoiceLogprobs:
    """The `logprobs` object of a choice."""
    return ChoiceLogprobs([_to_logprob(entry) for entry in logprobs])


def _to_logprob(entry: OutputLogprob) -> ChatLogprob:
    chosen = entry.chosen
    top = [TopLogprob(rival.token, rival.logprob, _bytes(rival)) for rival in entry.top]
    return ChatLogprob(chosen.token, chosen.logprob, _bytes(chosen), top)


def _bytes(entry: TokenLogprob) -> tuple[int, ...]:
    return tuple(entry.token_bytes)
