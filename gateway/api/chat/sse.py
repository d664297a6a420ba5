"""Streamed answers: events to `data:` frames. What arrives together leaves together.

Order of a stream: for each choice a role chunk, content chunks and a chunk with `finish_reason`; then, if asked
for, a chunk without choices that holds the usage; then `[DONE]`. JSON has no raw line breaks, so no text of a
model can break a frame.

Source: OpenAI API reference, "Streaming events"; WHATWG HTML, "Server-sent events".
"""

from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType

from gateway.api.chat.answer import AnswerHead, to_choice_logprobs
from gateway.api.chat.schemas import (
    ChatCompletionChunk,
    ChoiceDelta,
    ChunkChoice,
    CompletionUsage,
    encode,
)
from gateway.calls.open_call import ChoiceEvent
from gateway.http.errors import ApiError
from shared.protocol import Finished, Tokens

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

Timings = dict[str, float]


def frame(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


def error_frame(error: ApiError) -> bytes:
    """How a stream ends that cannot be completed; no `[DONE]` follows."""
    return frame(error.event())


def merge_deltas(events: Sequence[ChoiceEvent]) -> Iterator[ChoiceEvent]:
    """The same events with adjacent deltas of one choice made one."""
    held: tuple[int, Tokens] | None = None
    for index, event in events:
        if held is not None and isinstance(event, Tokens) and held[0] == index:
            held = (index, _merge(held[1], event))
            continue
        if held is not None:
            yield held
        held = None
        if isinstance(event, Tokens):
            held = (index, event)
        else:
            yield index, event
    if held is not None:
        yield held


def _merge(first: Tokens, second: Tokens) -> Tokens:
    return Tokens(
        first.request_id,
        first.attempt,
        first.index,
        first.token_ids + second.token_ids,
        first.text + second.text,
        first.logprobs + second.logprobs,
    )


class ChunkWriter:
    """Turns the events of one request into frames."""

    def __init__(
        self,
        head: AnswerHead,
        *,
        include_usage: bool,
        with_logprobs: bool,
        last_id: int | None = None,
    ) -> None:
        """`last_id`: number the frames, and leave out those up to this one; -1 for all; None: no numbers."""
        self.head = head
        self.last_id = last_id
        self._num_tokens = 0
        self.with_logprobs = with_logprobs
        self._no_usage: UnsetType | None = None if include_usage else UNSET
        self._begun: set[int] = set()

    def frames(
        self, events: Sequence[ChoiceEvent], timings: Timings | UnsetType = UNSET
    ) -> list[bytes]:
        """The frames of events that arrived together; `timings` go to the last if it ends a choice."""
        frames: list[bytes] = []
        if self.last_id is not None:
            events = self._unseen(events, self.last_id)
        last = events[-1][1] if events else None
        for index, event in merge_deltas(events) if len(events) > 1 else events:
            if index not in self._begun:
                self._begun.add(index)
                frames.append(self._chunk(ChunkChoice(index, ChoiceDelta("assistant", "")), 0))
            if isinstance(event, Tokens):
                if event.text or (self.with_logprobs and event.logprobs):
                    id_ = event.index + len(event.token_ids)
                    frames.append(self._chunk(self._content(index, event), id_))
            elif isinstance(event, Finished):
                self._num_tokens = event.usage.num_output_tokens
                choice = ChunkChoice(index, ChoiceDelta(), None, event.finish_reason.value)
                shown = timings if event is last else UNSET
                frames.append(self._chunk(choice, self._num_tokens + 1, shown))
        return frames

    def _unseen(self, events: Sequence[ChoiceEvent], last_id: int) -> list[ChoiceEvent]:
        """Without the tokens that the client has."""
        return [
            (index, event)
            for index, event in events
            if not isinstance(event, Tokens) or event.index + len(event.token_ids) > last_id
        ]

    def _content(self, index: int, event: Tokens) -> ChunkChoice:
        logprobs = to_choice_logprobs(event.logprobs) if self.with_logprobs else None
        return ChunkChoice(index, ChoiceDelta(content=event.text), logprobs)

    def _chunk(self, choice: ChunkChoice, id_: int, timings: Timings | UnsetType = UNSET) -> bytes:
        return self._numbered(self._encode([choice], self._no_usage, timings), id_)

    def _numbered(self, data: bytes, id_: int) -> bytes:
        """A frame under its id; nothing if the client has it. Ids count the tokens told, then the end's frames."""
        if self.last_id is None:
            return data
        return b"id: %d\n" % id_ + data if id_ > self.last_id else b""

    def usage(self, usage: CompletionUsage, timings: Timings | UnsetType) -> bytes:
        """The chunk after the last choice's, where the client asked for the usage."""
        return self._numbered(self._encode([], usage, timings), self._num_tokens + 2)

    def done(self) -> bytes:
        """The last frame."""
        return self._numbered(DONE, self._num_tokens + 3)

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
            service_tier=head.service_tier,
            usage=usage,
            timings=timings,
        )
        return frame(encode(chunk))
