"""Events to be published; consecutive events of a request are merged while they wait.

Redis's CPU time depends on the number of published items, so items are few: answers that are not streamed are published
every `HOLD_S` and at their end, and streams of a busy worker every `STREAM_HOLD_S`.
It does no I/O, and is used on the event loop only.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from engines.base import EngineOutput
from shared.protocol import (
    CallEvent,
    Failed,
    Finished,
    Run,
    Scores,
    Started,
    Tokens,
    Vectors,
    encode_events,
    join_calls,
)
from shared.queue.api import Claim, Ending, Publication, shard_of

if TYPE_CHECKING:
    from worker.active_requests import ActiveRequest

#: Longest delay of tokens of an answer that is not streamed; this much work is lost with a worker.
HOLD_S = 0.25
#: Minimum time between two publications of a stream, if the worker runs at least `MIN_COALESCED_STREAMS`.
STREAM_HOLD_S = 0.05
MIN_COALESCED_STREAMS = 16
#: Vectors and scores up to this size are sent with their event, through log and mailbox.
MAX_INLINE_BYTES = 16 * 1024


class _Draft(Struct):
    """Unpublished events of one request, in order."""

    begun_at: float
    posted: list[CallEvent] = field(default_factory=list)

    @property
    def is_last(self) -> bool:
        return isinstance(self.posted[-1], Finished | Failed)

    @property
    def deltas(self) -> list[Tokens]:
        return [event for event in self.posted if isinstance(event, Tokens)]

    def events(self) -> Sequence[CallEvent]:
        """The events; their tokens are merged into one."""
        deltas = self.deltas
        if len(deltas) < 2:
            return self.posted
        first, start = deltas[0], self.posted.index(deltas[0])
        whole = join_tokens(first.request_id, first.attempt, deltas)
        return (*self.posted[:start], whole, *self.posted[start + len(deltas) :])


class Outbox:
    """Events to be published to one shard. `hold_s`: see `HOLD_S`.

    `published_at`: when tokens of each open stream were published; the outboxes of a worker share it.
    """

    def __init__(
        self, hold_s: float = HOLD_S, published_at: "dict[ActiveRequest, float] | None" = None
    ) -> None:
        self._hold_s = hold_s
        self._held: dict[ActiveRequest, _Draft] = {}  # delayed
        self._due: dict[ActiveRequest, _Draft] = {}  # due
        self._published_at = {} if published_at is None else published_at
        self._timer: asyncio.TimerHandle | None = None  # for delayed streams
        # Requests with a terminal event that are not yet dropped.
        self._ended: set[ActiveRequest] = set()
        self._refusals: list[Publication] = []
        self._filled = asyncio.Event()

    def post(self, active: "ActiveRequest", event: CallEvent) -> None:
        """Add an event of a request; events after its terminal event are dropped."""
        if active in self._ended:
            return
        now = time.monotonic()
        draft = self._due.get(active) or self._held.pop(active, None) or _Draft(now)
        draft.posted.append(event)
        if draft.is_last:
            self._ended.add(active)
        elif not active.call.wants_stream and now - draft.begun_at < self._hold_s:
            self._held[active] = draft
            return
        elif active not in self._due and (wait_s := self._wait_s(active, now)) > 0.0:
            self._held[active] = draft
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._release)
            return
        self._due[active] = draft
        self._filled.set()

    def _wait_s(self, active: "ActiveRequest", now: float) -> float:
        """Delay of a stream's tokens. The first tokens are not delayed."""
        if len(self._published_at) < MIN_COALESCED_STREAMS or active not in self._published_at:
            return 0.0
        return self._published_at[active] + STREAM_HOLD_S - now

    def _release(self) -> None:
        self._timer = None
        for active in [active for active in self._held if active.call.wants_stream]:
            self._due[active] = self._held.pop(active)
        self._filled.set()

    async def take(self) -> list[Publication]:
        """All due events, one publication per request; waits until there are some."""
        while not self._due and not self._refusals:
            self._filled.clear()
            await self._filled.wait()
        drafts, self._due = self._due, {}
        now = time.monotonic()
        for active, draft in drafts.items():
            if active.call.wants_stream and not draft.is_last and draft.deltas:
                self._published_at[active] = now
        refusals, self._refusals = self._refusals, []
        return refusals + [_publication(active, draft) for active, draft in drafts.items()]

    def refuse(self, refusal: Publication) -> None:
        self._refusals.append(refusal)
        self._filled.set()

    def drop(self, active: "ActiveRequest") -> None:
        self._held.pop(active, None)
        self._due.pop(active, None)
        self._published_at.pop(active, None)
        self._ended.discard(active)


class Outboxes:
    """One outbox for each shard, by name."""

    def __init__(self, shards: Iterable[str]) -> None:
        published_at: dict[ActiveRequest, float] = {}
        self.by_shard = {name: Outbox(published_at=published_at) for name in shards}
        self._first = next(iter(self.by_shard.values()))

    def of(self, claim: Claim) -> Outbox:
        return self.by_shard.get(shard_of(claim.id), self._first)


def _publication(active: "ActiveRequest", draft: _Draft) -> Publication:
    active.num_publications += 1
    publication = to_publication(
        active.claim, active.num_publications, active.num_tokens, draft.events()
    )
    if isinstance(active.call.task, Run) and active.call.task.keep_s:
        publication = replace(publication, keep_s=active.call.task.keep_s)
    active.num_tokens += publication.num_new_tokens
    return publication


def to_publication(
    claim: Claim, number: int, num_tokens: int, events: Sequence[CallEvent], dead_reason: str = ""
) -> Publication:
    """Events for the queue; `num_tokens` output tokens came before them."""
    last, result = events[-1], b""
    ending: Ending | None = None
    if isinstance(last, Finished | Failed):
        ending = "finished" if isinstance(last, Finished) else "failed"
        events, result = _split_off_result(events)
    usage = None
    for event in events:
        if isinstance(event, Started | Finished):
            usage = (event.usage.num_prompt_tokens, event.usage.num_cached_tokens)
    num_new_tokens = sum([event.num_tokens for event in events if isinstance(event, Tokens)])
    encoded = encode_events(events)
    return Publication(
        claim, number, num_tokens, num_new_tokens, encoded, ending, dead_reason, result, usage=usage
    )


def _split_off_result(events: Sequence[CallEvent]) -> tuple[Sequence[CallEvent], bytes]:
    """The events without a large result, and that result."""
    for index, event in enumerate(events):
        if isinstance(event, Vectors | Scores) and len(event.data) > MAX_INLINE_BYTES:
            stored = replace(event, data=b"", is_stored=True)
            return (*events[:index], stored, *events[index + 1 :]), event.data
    return events, b""


def join_tokens(request_id: str, attempt: int, pieces: Sequence[EngineOutput | Tokens]) -> Tokens:
    """Merge consecutive tokens into one event."""
    first = pieces[0]
    token_ids, logprobs, calls = [*first.token_ids], [*first.logprobs], [*first.calls]
    prompt_logprobs = first.prompt_logprobs
    texts, thoughts, num_without_id = [first.text], [first.reasoning], first.num_without_id
    for piece in pieces[1:]:  # most have few tokens and a short text
        token_ids += piece.token_ids
        texts.append(piece.text)
        if piece.logprobs:
            logprobs += piece.logprobs
        if piece.calls:
            calls += piece.calls
        if piece.reasoning:
            thoughts.append(piece.reasoning)
        if piece.prompt_logprobs:
            prompt_logprobs += piece.prompt_logprobs
        if piece.num_without_id:
            num_without_id += piece.num_without_id
    return Tokens(
        request_id,
        attempt,
        first.index,
        tuple(token_ids),
        "".join(texts),
        tuple(logprobs),
        num_without_id,
        "".join(thoughts),
        join_calls(calls) if calls else (),
        prompt_logprobs,
    )
