"""Events that wait to be published: consecutive ones of a request merge while a publish is under way.

Pure: no Redis. Filled and emptied on the event loop.
"""

import asyncio
from dataclasses import dataclass, field

from shared.protocol import Delta, Failed, Finished, GenerateEvent, Started
from shared.publication import Publication
from worker.flight import Flight


@dataclass(slots=True)
class _Draft:
    """What is to be said about one request."""

    started: Started | None = None
    deltas: list[Delta] = field(default_factory=list)
    terminal: Finished | Failed | None = None

    def events(self) -> tuple[GenerateEvent, ...]:
        parts: list[GenerateEvent] = []
        if self.started is not None:
            parts.append(self.started)
        if self.deltas:
            parts.append(merge(self.deltas))
        if self.terminal is not None:
            parts.append(self.terminal)
        return tuple(parts)


def merge(deltas: list[Delta]) -> Delta:
    """One delta that says what these consecutive ones say."""
    if len(deltas) == 1:
        return deltas[0]
    first = deltas[0]
    return Delta(
        first.request_id,
        first.attempt,
        first.index,
        tuple(token for delta in deltas for token in delta.token_ids),
        "".join([delta.text for delta in deltas]),
        tuple(logprob for delta in deltas for logprob in delta.logprobs),
    )


class Outbox:
    """What to publish next."""

    def __init__(self) -> None:
        self._drafts: dict[Flight, _Draft] = {}
        self._ended: set[Flight] = (
            set()
        )  # flights whose end was posted and that are not yet dropped
        self._filled = asyncio.Event()

    def post(self, flight: Flight, event: GenerateEvent) -> None:
        """Say something about a request; nothing counts after its terminal event."""
        if flight in self._ended:
            return
        draft = self._drafts.get(flight)
        if draft is None:
            draft = self._drafts[flight] = _Draft()
        if isinstance(event, Delta):
            draft.deltas.append(event)
        elif isinstance(event, Started):
            draft.started = event
        else:
            draft.terminal = event
            self._ended.add(flight)
        self._filled.set()

    async def take(self) -> list[Publication]:
        """All that waits, one publication a request; waits until there is something."""
        while not self._drafts:
            self._filled.clear()
            await self._filled.wait()
        drafts, self._drafts = self._drafts, {}
        return [_publication(flight, draft) for flight, draft in drafts.items()]

    def drop(self, flight: Flight) -> None:
        """Forget a request."""
        self._drafts.pop(flight, None)
        self._ended.discard(flight)


def _publication(flight: Flight, draft: _Draft) -> Publication:
    flight.num_publications += 1
    publication = Publication(
        flight.claim, flight.num_publications, flight.num_tokens, draft.events()
    )
    flight.num_tokens += publication.num_new_tokens
    return publication
