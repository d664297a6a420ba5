"""How work comes in: the loops that claim requests, batch work where that leaves room, and what
others have left. A loop outlives an outage of Redis.

Called by the worker, one loop a coroutine.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from shared.queue.api import QueueUnavailable, WorkerQueue
from shared.redis.client import BLOCK_S
from shared.settings.tree import WorkerSettings
from worker.active_requests import ActiveRequests
from worker.engine_thread import EngineThread

#: How long a worker that was idle lets its engine begin before it reads on: one interpreter is not
#: used twice at a time.
ENGINE_FIRST_S = 0.001
#: Requests that one read claims at most: the rest of a burst is left to workers that are idle too.
MAX_CLAIMS_PER_READ = 8


logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


class ClaimLoops:
    """Starts what the engine has room for."""

    def __init__(
        self,
        settings: WorkerSettings,
        queue: WorkerQueue,
        engine: EngineThread,
        active_requests: ActiveRequests,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._engine = engine
        self._active_requests = active_requests
        self._batch_waits = asyncio.Event()

    async def claim_requests(self) -> None:
        """Claim what the engine can start soon, and no more."""
        await repeat(self._claim_once, "claim requests")

    async def _claim_once(self) -> None:
        while (room := self._limit(self._active_requests.room())) == 0:
            await self._active_requests.wait_for_change()
        claims = await self._queue.read(room, BLOCK_S)
        was_idle = not self._active_requests
        self._active_requests.start(claims)
        if self._queue.num_backlog:
            self._batch_waits.set()
        if was_idle and claims:
            await self._active_requests.wait_for_change(ENGINE_FIRST_S)

    async def claim_batch_work(self) -> None:
        """Claim batch work while nobody else waits for the room that there is."""
        await repeat(self._claim_batch_once, "claim batch work")

    async def _claim_batch_once(self) -> None:
        while not self._queue.num_backlog:
            self._batch_waits.clear()
            await self._batch_waits.wait()
        while (room := self._limit(self._active_requests.batch_room())) == 0:
            await self._active_requests.wait_for_change()
        self._active_requests.start(await self._queue.take(room))

    def _limit(self, room: int) -> int:
        """A few at a time, and none while a step drags on: others may be quicker."""
        started_at = self._engine.step_started_at
        if started_at is not None and time.monotonic() - started_at > self._settings.lease_s / 2:
            return 0
        return min(room, MAX_CLAIMS_PER_READ)

    async def reclaim_requests(self) -> None:
        """Take over what other workers, or lost replies, have left lying."""
        await repeat(self._reclaim_once, "reclaim requests", self._settings.heartbeat_s)

    async def _reclaim_in_turn(self) -> None:
        """One by one, each once the last need not be alone: others try other suspects meanwhile."""
        until = time.monotonic() + self._settings.heartbeat_s
        while self._limit(self._active_requests.room()) and (
            claims := await self._queue.reclaim(1)
        ):
            self._active_requests.start(claims)
            while self._active_requests.is_held_up() and time.monotonic() < until:
                await self._active_requests.wait_for_change()

    async def _reclaim_once(self) -> None:
        self._active_requests.start(await self._queue.reconcile())
        if self._queue.num_backlog:
            self._batch_waits.set()
        await self._reclaim_in_turn()


async def repeat(body: Callable[[], Awaitable[None]], name: str, every_s: float = 0.0) -> None:
    """Run `body` again and again, `every_s` apart; while Redis fails, with growing pauses."""
    pause_s = 0.0
    while True:
        try:
            await body()
        except (QueueUnavailable, RedisError) as error:
            if pause_s == 0.0:
                logger.warning("cannot %s: %s; trying on", name, error)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2 or FIRST_PAUSE_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            continue
        if pause_s:
            logger.warning("can %s again", name)
            pause_s = 0.0
        if every_s:
            await asyncio.sleep(every_s)
