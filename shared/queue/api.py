"""What gateways and workers ask of a queue. The Redis implementation lies beside it.

A queue carries envelopes: it never reads a call or an event. Methods may be called again after an error: a repeated
call changes nothing. A claim's attempt number fences all earlier attempts.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from shared.protocol import Envelope
from shared.queue.publish import Claim, Publication
from shared.queue.submit import Bounds, RequestState


class GatewayQueue(Protocol):
    """The gateway's end. All methods raise QueueUnavailable."""

    async def enqueue(
        self,
        choices: Sequence[Envelope],
        *,
        timeout_s: float,
        num_tokens: int,
        bounds: Bounds,
        num_held_tokens: int = 0,
    ) -> None:
        """Queue the calls of one request, all or none. Raises: QueueRefused, DuplicateRequest."""
        ...

    async def cancel(self, model: str, request_ids: list[str]) -> None:
        """Cancel calls, whatever their state; unknown and ended ones are ignored."""
        ...

    async def state(self, model: str, request_id: str) -> RequestState | None:
        """How a call stands; None if it is not known."""
        ...

    async def listen(self, model: str, request_id: str, gateway_id: str) -> RequestState | None:
        """How a call stands; while it is open, its events go to this gateway's mailbox too."""
        ...

    async def events(self, model: str, request_id: str) -> list[bytes]:
        """Every event of a call that was accepted so far, encoded, in order."""
        ...


class WorkerQueue(Protocol):
    """One worker's end of one model's queue."""

    async def read(self, count: int, block_s: float) -> list[Claim]:
        """Claim up to `count` waiting calls; wait for the first."""
        ...

    async def take(self, count: int) -> list[Claim]:
        """Claim up to `count` calls, batch ones where nobody else waits; does not wait."""
        ...

    async def reclaim(self, count: int) -> list[Claim]:
        """Claim up to `count` calls whose lease has run out."""
        ...

    async def publish(self, publications: Sequence[Publication]) -> dict[str, str]:
        """Send events. Returns the calls that were refused, and why: they are no longer this worker's."""
        ...

    async def renew(self, claims: Iterable[Claim]) -> dict[str, str]:
        """Keep the leases. Returns the calls that are no longer ours, and why."""
        ...

    async def release(self, claims: Iterable[Claim], *, blame: bool = False) -> int:
        """Give calls back for others to take at once; returns how many."""
        ...
