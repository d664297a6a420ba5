"""Streamed answers: events to `data:` frames. What arrives together leaves together.

Order of a stream: for each choice a role chunk, content chunks and a chunk with `finish_reason`; then, if asked
for, a chunk without choices that holds the usage; then `[DONE]`. JSON has no raw line breaks, so no text of a
model can break a frame.

Source: OpenAI API reference, "Streaming events"; WHATWG HTML, "Server-sent events".
"""

from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType

from gateway.answer import AnswerHead, to_choice_logprobs
from gateway.errors import ApiError
from gateway.generation import ChoiceEvent
from gateway.schemas import (
    ChatCompletionChunk,
    ChoiceDelta,
    ChunkChoice,
    CompletionUsage,
    encode,
)
from shared.protocol import Delta, Finished

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

Timings = dict[str, float]


def frame(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def error_frame(error: ApiError) -> bytes:
    """How a stream ends that cannot be completed; no `[DONE]` follows."""
    return frame(error.body())


def merge_deltas(events: Sequence[ChoiceEvent]) -> Iterator[ChoiceEvent]:
    """The same events with adjacent deltas of one choice made one."""
    held: tuple[int, Delta] | None = None
    for index, event in events:
        if held is not None and isinstance(event, Delta) and held[0] == index:
            held = (index, _merge(held[1], event))
            continue
        if held is not None:
            yield held
        held = None
        if isinstance(event, Delta):
            held = (index, event)
        else:
            yield index, event
    if held is not None:
        yield held


def _merge(first: Delta, second: Delta) -> Delta:
    return Delta(
        first.request_id,
        first.attempt,
        first.index,
        first.token_ids + second.token_ids,
        first.text + second.text,
        first.logprobs + second.logprobs,
    )


class ChunkWriter:
    """Turns the events of one request into frames."""

    def __init__(self, head: AnswerHead, *, include_usage: bool, with_logprobs: bool) -> None:
        self.head = head
        self.with_logprobs = with_logprobs
        self._no_usage: UnsetType | None = None if include_usage else UNSET
        self._begun: set[int] = set()

    def frames(
        self, events: Sequence[ChoiceEvent], timings: Timings | UnsetType = UNSET
    ) -> list[bytes]:
        """The frames of events that arrived together; `timings` go to the last if it ends a choice."""
        frames: list[bytes] = []
        last = events[-1][1] if events else None
        for index, event in merge_deltas(events) if len(events) > 1 else events:
            if index not in self._begun:
                self._begun.add(index)
                frames.append(self._chunk(ChunkChoice(index, ChoiceDelta("assistant", ""))))
            if isinstance(event, Delta):
                if event.text or (self.with_logprobs and event.logprobs):
                    frames.append(self._chunk(self._content(index, event)))
            elif isinstance(event, Finished):
                choice = ChunkChoice(index, ChoiceDelta(), None, event.finish_reason.value)
                frames.append(self._chunk(choice, timings if event is last else UNSET))
        return frames

    def _content(self, index: int, event: Delta) -> ChunkChoice:
        logprobs = to_choice_logprobs(event.logprobs) if self.with_logprobs else None
        return ChunkChoice(index, ChoiceDelta(content=event.text), logprobs)

    def _chunk(self, choice: ChunkChoice, timings: Timings | UnsetType = UNSET) -> bytes:
        return self._encode([choice], self._no_usage, timings)

    def usage(self, usage: CompletionUsage, timings: Timings | UnsetType) -> bytes:
        """The chunk after the last choice's, where the client asked for the usage."""
        return self._encode([], usage, timings)

    def _encode(
        self,
        choices: list[ChunkChoice],
        usage: CompletionUsage | UnsetType | None,
        timings: Timings | UnsetType,
    ) -> bytes:
        head = self.head
        chunk = ChatCompletionChunk(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=usage,
            timings=timings,
        )
        return frame(encode(chunk))
