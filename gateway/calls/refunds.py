"""What answers came to beyond what was taken for them, or less: told to Redis once they have ended,
on no request's way.

A limit in tokens a minute takes what a request may come to as it comes in. How long an answer
became is in Redis, where it is right whoever died; who has gone on without its client is asked
about until it ends. If this gateway dies first, what was taken stands.
"""

import asyncio
import logging
from contextlib import suppress

from shared.queue.api import GatewayQueue, QueueUnavailable, Reservation

PAUSE_S = 0.25

logger = logging.getLogger(__name__)


class Refunds:
    """The requests of this gateway that are not refunded yet. One task, one look at a time."""

    def __init__(self, queue: GatewayQueue) -> None:
        self._queue = queue
        self._open: set[Reservation] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="refund answers")

    async def stop(self) -> None:
        """Refund what has ended, and leave the rest."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        with suppress(QueueUnavailable):
            await self._refund()

    @property
    def num_open(self) -> int:
        """Requests whose clients have gone and that are not refunded."""
        return len(self._open)

    def add(self, reservation: Reservation) -> None:
        """Refund a request as soon as its answers have ended."""
        self._open.add(reservation)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PAUSE_S)
            try:
                await self._refund()
            except QueueUnavailable:
                continue
            except Exception:
                logger.exception("cannot refund answers")

    async def _refund(self) -> None:
        """Raises: QueueUnavailable."""
        for reservation in list(self._open):
            if await self._queue.refund(reservation):
                self._open.discard(reservation)
