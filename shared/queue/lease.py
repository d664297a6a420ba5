"""Leases of what gateways do one at a time."""

from redis.asyncio import Redis

from shared.queue.api import QueueUnavailable
from shared.queue.keys import RedisKeys, to_ms
from shared.queue.scripts import HOLD, named
from shared.redis.client import redis_errors_as, retry_idempotent
from shared.redis.link import RedisSender


class RedisLeases:
    """The leases under one key prefix, by name."""

    def __init__(self, redis: Redis, keys_prefix: str) -> None:
        self._keys = RedisKeys(keys_prefix)
        self._sender = RedisSender(redis)

    async def hold(self, name: str, holder: str, ttl_s: float) -> bool:
        """Take a lease or renew it; whether it is the holder's. Raises: QueueUnavailable."""
        return await self._run(name, holder=holder, ttl_ms=to_ms(ttl_s))

    async def drop(self, name: str, holder: str) -> None:
        """Give a lease back. Raises: QueueUnavailable."""
        await self._run(name, holder=holder, ttl_ms=0)

    @redis_errors_as(QueueUnavailable)
    async def _run(self, name: str, **arguments: str | int) -> bool:
        keys = (self._keys.lease(name),)
        held = await retry_idempotent(lambda: self._sender.run(HOLD, keys, named(**arguments)))
        return held == 1

    async def close(self) -> None:
        await self._sender.close()
