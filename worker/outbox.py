"""Events that wait to be published: consecutive ones of a request merge while a publish is under way.

Tokens that nobody reads as they come wait a little longer, for the end of their answer at best. Pure: no Redis.
Filled and emptied on the event loop.
"""

import asyncio
import time
from dataclasses import dataclass, field

from shared.protocol import CallEvent, Failed, Finished, Started, Tokens
from shared.queue.api import Publication
from worker.active_request import ActiveRequest, to_delta
from worker.wire import to_publication

#: How long tokens of an answer that is wanted whole wait at most; so much work is lost with a worker.
HOLD_S = 0.25


@dataclass(slots=True)
class _Draft:
    """What is to be said about one request."""

    begun_at: float
    started: Started | None = None
    deltas: list[Tokens] = field(default_factory=list)
    terminal: Finished | Failed | None = None

    def add(self, event: CallEvent) -> None:
        """Say one thing more."""
        if isinstance(event, Tokens):
            self.deltas.append(event)
        elif isinstance(event, Started):
            self.started = event
        else:
            self.terminal = event

    def events(self) -> tuple[CallEvent, ...]:
        """What was said, tokens in one piece."""
        parts: list[CallEvent] = []
        if self.started is not None:
            parts.append(self.started)
        if self.deltas:
            first, *others = self.deltas
            parts.append(
                to_delta(first.request_id, first.attempt, self.deltas) if others else first
            )
        if self.terminal is not None:
            parts.append(self.terminal)
        return tuple(parts)


class Outbox:
    """What to publish next. `hold_s`: see `HOLD_S`."""

    def __init__(self, hold_s: float = HOLD_S) -> None:
        self._hold_s = hold_s
        self._held: dict[ActiveRequest, _Draft] = {}  # for later
        self._due: dict[ActiveRequest, _Draft] = {}  # for now
        # ActiveRequests whose end was posted and that are not yet dropped.
        self._ended: set[ActiveRequest] = set()
        self._refusals: list[Publication] = []
        self._filled = asyncio.Event()

    def post(self, active: ActiveRequest, event: CallEvent) -> None:
        """Say something about a request; nothing counts after its terminal event."""
        if active in self._ended:
            return
        now = time.monotonic()
        draft = self._due.get(active) or self._held.pop(active, None) or _Draft(now)
        draft.add(event)
        if draft.terminal is not None:
            self._ended.add(active)
        elif not active.call.wants_stream and now - draft.begun_at < self._hold_s:
            self._held[active] = draft
            return
        self._due[active] = draft
        self._filled.set()

    async def take(self) -> list[Publication]:
        """All that is due, one publication a request; waits until there is something."""
        while not self._due and not self._refusals:
            self._filled.clear()
            await self._filled.wait()
        drafts, self._due = self._due, {}
        refusals, self._refusals = self._refusals, []
        return [*refusals, *(_publication(active, draft) for active, draft in drafts.items())]

    def refuse(self, refusal: Publication) -> None:
        """Publish the end of a call that cannot be read."""
        self._refusals.append(refusal)
        self._filled.set()

    def drop(self, active: ActiveRequest) -> None:
        """Forget a request."""
        self._held.pop(active, None)
        self._due.pop(active, None)
        self._ended.discard(active)


def _publication(active: ActiveRequest, draft: _Draft) -> Publication:
    active.num_publications += 1
    publication = to_publication(
        active.claim, active.num_publications, active.num_tokens, draft.events()
    )
    active.num_tokens += publication.num_new_tokens
    return publication
