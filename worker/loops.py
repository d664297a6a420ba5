"""Loops that claim requests: interactive ones, batch ones, and those that other workers have lost.

Each loop is a coroutine of the worker, and survives outages of Redis.
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

#: Pause of an idle worker after a claim, in which the engine thread starts: both need the interpreter lock.
ENGINE_FIRST_S = 0.001
#: Maximum requests of one read: other idle workers take the rest of a burst.
MAX_CLAIMS_PER_READ = 8


logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


class ClaimLoops:
    """Claims and starts as many requests as the engine has room for."""

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
        """Claim interactive requests that the engine can start soon."""
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
        """Claim batch requests while no interactive ones wait."""
        await repeat(self._claim_batch_once, "claim batch work")

    async def _claim_batch_once(self) -> None:
        while not self._queue.num_backlog:
            self._batch_waits.clear()
            await self._batch_waits.wait()
        while (room := self._limit(self._active_requests.batch_room())) == 0:
            await self._active_requests.wait_for_change()
        self._active_requests.start(await self._queue.take(room))

    def _limit(self, room: int) -> int:
        """Limit a claim to a few requests, and to none during a long step: other workers may be faster."""
        started_at = self._engine.step_started_at
        if started_at is not None and time.monotonic() - started_at > self._settings.lease_s / 2:
            return 0
        return min(room, MAX_CLAIMS_PER_READ)

    async def reclaim_requests(self) -> None:
        """Take over requests of lost workers and lost replies."""
        await repeat(self._reclaim_once, "reclaim requests", self._settings.heartbeat_s)

    async def _reclaim_in_turn(self) -> None:
        """Reclaim one by one, so that other workers may try other possible poison requests."""
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
    """Run `body` for ever, `every_s` apart; with growing pauses while Redis fails."""
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
