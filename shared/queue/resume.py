"""Records of requests that outlive their connection, for any gateway, and exclusive leases of gateways."""

import asyncio
import time
from contextlib import suppress

from shared.queue.api import QueueUnavailable
from shared.queue.keys import RedisStore, to_ms
from shared.queue.scripts import HOLD
from shared.redis.client import redis_errors_as


@redis_errors_as(QueueUnavailable)
class ResumableCalls(RedisStore):
    """Gateways' records of resumable requests. All methods raise QueueUnavailable."""

    async def remember(self, request_id: str, record: bytes, ttl_s: float) -> bool:
        """Store a gateway's record of a request; returns False if one exists.

        Not retried: after a lost reply, a retry would find its own record and return False.
        """
        command = ("SET", self._keys.stream(request_id), record, "NX", "PX", to_ms(ttl_s))
        return await self._sender.execute(*command) is not None

    async def replace(self, request_id: str, record: bytes, ttl_s: float) -> None:
        await self._ask("SET", self._keys.stream(request_id), record, "XX", "PX", to_ms(ttl_s))

    async def recall(self, request_id: str) -> bytes | None:
        return await self._ask("GET", self._keys.stream(request_id))

    async def confirm(self, request_id: str) -> None:
        """Wait until a replica has the record, if there is a replica."""
        await self._confirm(("EXISTS", self._keys.stream(request_id)))

    async def forget(self, request_id: str) -> None:
        await self._ask("DEL", self._keys.stream(request_id))


@redis_errors_as(QueueUnavailable)
class Leases(RedisStore):
    """Exclusive leases by name. All methods raise QueueUnavailable."""

    async def hold(self, name: str, holder: str, ttl_s: float) -> bool:
        """Acquire or renew a lease. Returns True if `holder` has the lease."""
        keys = (self._keys.lease(name),)
        return await self._run(HOLD, keys, holder=holder, ttl_ms=to_ms(ttl_s)) == 1

    async def renew(self, name: str, holder: str, ttl_s: float) -> None:
        """Renew a lease. Returns when the lease is lost or may be lost."""
        held_at = time.monotonic()
        while time.monotonic() < held_at + ttl_s * 0.7:
            await asyncio.sleep(ttl_s / 5)
            with suppress(QueueUnavailable):
                asked_at = time.monotonic()
                if not await self.hold(name, holder, ttl_s):
                    return
                held_at = asked_at

    async def drop(self, name: str, holder: str) -> None:
        await self._run(HOLD, (self._keys.lease(name),), holder=holder, ttl_ms=0)
