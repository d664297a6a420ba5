"""Waits until a replica has received a write.

Redis replicates asynchronously, so a failover can lose writes that the primary has acknowledged.
"""

import asyncio
import logging
from collections.abc import Sequence

from redis import exceptions
from redis.asyncio import Redis

from shared.process import cancel
from shared.redis.client import Command, RedisLink, settle

WITHIN_S = 0.5
#: How often to check whether the primary has replicas.
CHECK_EVERY_S = 1.0
_MARKER_TTL_MS = 60_000

logger = logging.getLogger(__name__)

_Waiter = tuple[Sequence[Command], asyncio.Future[None]]


class Confirmer:
    """Confirms writes on a separate connection, because `WAIT` delays later commands.

    Concurrent callers share a `WAIT`. Without replicas, `confirm` returns immediately.
    """

    def __init__(self, redis: Redis, marker: str) -> None:
        self._link = RedisLink(redis)
        #: A key to write before each `WAIT`, which waits only for writes of its own connection.
        self._marker = marker
        self._waiting: list[_Waiter] = []
        self._task: asyncio.Task[None] | None = None
        self._has_replica = False
        self._checked_at = -CHECK_EVERY_S
        self._is_refused = False

    async def confirm(self, *proofs: Command) -> None:
        """Wait until a replica has received the caller's writes. `proofs`: commands that reply true if the writes exist.

        The proofs show that this connection has the same primary as the connection of the writes. Raises: RedisError.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((proofs, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            async with asyncio.timeout(2 * WITHIN_S):  # an earlier round may have to end first
                await future
        except TimeoutError as error:
            raise exceptions.TimeoutError("no replica has confirmed the write in time") from error

    async def _run(self) -> None:
        while self._waiting:
            waiters, self._waiting = self._waiting, []
            try:
                await self._check_replicas()
                results = (
                    await self._confirm(waiters) if self._has_replica else [None] * len(waiters)
                )
            except Exception as error:
                results = [error] * len(waiters)
            for (_, future), result in zip(waiters, results, strict=True):
                settle(future, result)

    async def _check_replicas(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._checked_at < CHECK_EVERY_S:
            return
        try:
            role, *_, replicas = await self._link.execute("ROLE")
        except exceptions.ResponseError as error:
            if not self._is_refused:
                self._is_refused = True
                logger.warning(
                    "cannot ask Redis for its replicas, so nothing is confirmed: %s", error
                )
            replicas = ()
        else:
            if role != b"master":
                self._link.close()
                raise exceptions.ConnectionError("this server is not the primary")
        self._has_replica, self._checked_at = bool(replicas), now

    async def _confirm(self, waiters: Sequence[_Waiter]) -> list[Exception | None]:
        proofs = [proof for proofs, _ in waiters for proof in proofs]
        marker = ("SET", self._marker, 1, "PX", _MARKER_TTL_MS)
        wait = ("WAIT", 1, round(1000 * WITHIN_S))
        *replies, written, num_replicas = await self._link.exchange([*proofs, marker, wait])
        failure = next((r for r in (written, num_replicas) if isinstance(r, Exception)), None)
        if failure is None and num_replicas == 0:
            failure = exceptions.TimeoutError("no replica has confirmed the write in time")
        results: list[Exception | None] = []
        for proofs, _ in waiters:
            own, replies = replies[: len(proofs)], replies[len(proofs) :]
            lost = next((r for r in own if isinstance(r, Exception)), None)
            if lost is None and not all(own):
                lost = exceptions.ConnectionError("the primary does not have the write")
            results.append(failure or lost)
        return results

    async def close(self) -> None:
        await cancel(self._task)
        self._link.close()
