"""Events that wait to be published: consecutive ones of a request merge while a publish is under way.

Tokens that nobody reads as they come wait a little longer, for the end of their answer at best. Pure: no Redis.
Filled and emptied on the event loop.
"""

import asyncio
import time
from dataclasses import dataclass, field

from shared.protocol import Delta, Failed, Finished, GenerateEvent, Started
from shared.queue.publication import Publication
from worker.active_request import Flight, to_delta

#: How long tokens of an answer that is wanted whole wait at most; so much work is lost with a worker.
HOLD_S = 0.25


@dataclass(slots=True)
class _Draft:
    """What is to be said about one request."""

    begun_at: float
    started: Started | None = None
    deltas: list[Delta] = field(default_factory=list)
    terminal: Finished | Failed | None = None

    def add(self, event: GenerateEvent) -> None:
        """Say one thing more."""
        if isinstance(event, Delta):
            self.deltas.append(event)
        elif isinstance(event, Started):
            self.started = event
        else:
            self.terminal = event

    def events(self) -> tuple[GenerateEvent, ...]:
        """What was said, tokens in one piece."""
        parts: list[GenerateEvent] = []
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
        self._held: dict[Flight, _Draft] = {}  # for later
        self._due: dict[Flight, _Draft] = {}  # for now
        # Flights whose end was posted and that are not yet dropped.
        self._ended: set[Flight] = set()
        self._filled = asyncio.Event()

    def post(self, flight: Flight, event: GenerateEvent) -> None:
        """Say something about a request; nothing counts after its terminal event."""
        if flight in self._ended:
            return
        now = time.monotonic()
        draft = self._due.get(flight) or self._held.pop(flight, None) or _Draft(now)
        draft.add(event)
        if draft.terminal is not None:
            self._ended.add(flight)
        elif not flight.claim.request.stream and now - draft.begun_at < self._hold_s:
            self._held[flight] = draft
            return
        self._due[flight] = draft
        self._filled.set()

    async def take(self) -> list[Publication]:
        """All that is due, one publication a request; waits until there is something."""
        while not self._due:
            self._filled.clear()
            await self._filled.wait()
        drafts, self._due = self._due, {}
        return [_publication(flight, draft) for flight, draft in drafts.items()]

    def drop(self, flight: Flight) -> None:
        """Forget a request."""
        self._held.pop(flight, None)
        self._due.pop(flight, None)
        self._ended.discard(flight)


def _publication(flight: Flight, draft: _Draft) -> Publication:
    flight.num_publications += 1
    publication = Publication(
        flight.claim, flight.num_publications, flight.num_tokens, draft.events()
    )
    flight.num_tokens += publication.num_new_tokens
    return publication
