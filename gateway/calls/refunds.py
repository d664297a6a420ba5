"""What answers came to beyond what was taken for them, or less: told to Redis once they have ended,
on no request's way.

A limit in tokens a minute takes what a request may come to as it comes in. How long an answer
became is in Redis, where it is right whoever died; who has gone on without its client is asked
about until it ends. If this gateway dies first, what was taken stands.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

from shared.queue.api import QueueUnavailable
from shared.queue.submit import RedisGatewayQueue

PAUSE_S = 0.25

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reservation:
    """What the answers of one request were taken to come to, each, of a tenant with so many tokens a minute."""

    model: str
    tenant: str
    request_ids: tuple[str, ...]
    num_tokens: int
    tokens_per_minute: int


class Refunds:
    """The requests of this gateway that are not settled yet. One task, one look at a time."""

    def __init__(self, queue: RedisGatewayQueue) -> None:
        self._queue = queue
        self._open: set[Reservation] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to settle."""
        self._task = asyncio.create_task(self._run(), name="settle answers")

    async def stop(self) -> None:
        """Settle what has ended, and leave the rest."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        with suppress(QueueUnavailable):
            await self._settle()

    @property
    def num_open(self) -> int:
        """Requests whose clients have gone and that are not settled."""
        return len(self._open)

    def add(self, taken: Reservation) -> None:
        """Settle a request as soon as its answers have ended."""
        self._open.add(taken)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PAUSE_S)
            try:
                await self._settle()
            except QueueUnavailable:
                continue
            except Exception:
                logger.exception("cannot settle what answers came to")

    async def _settle(self) -> None:
        """Raises: QueueUnavailable."""
        for taken in list(self._open):
            if await self._queue.settle(
                taken.model,
                taken.tenant,
                taken.request_ids,
                num_taken=taken.num_tokens,
                tokens_per_minute=taken.tokens_per_minute,
            ):
                self._open.discard(taken)
