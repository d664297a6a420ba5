"""Base class of stores that keep their state in Redis under one key prefix."""

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from shared.queue.keys import RedisKeys
from shared.redis.client import retry_idempotent
from shared.redis.confirm import Confirmer
from shared.redis.link import Command, RedisSender, Script, named


class RedisStore:
    """The keys and the connection. `_ask` and `_run` repeat idempotent commands and scripts after a lost reply."""

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._keys = RedisKeys(prefix)
        self._sender = RedisSender(redis)
        self._confirmer = Confirmer(redis, self._keys.confirmation)

    async def _ask(self, *command: str | bytes | int) -> Any:
        return await retry_idempotent(lambda: self._sender.execute(*command))

    async def _run(self, script: Script, keys: Sequence[str], *raw: bytes, **arguments: Any) -> Any:
        packed = named(*raw, **arguments)
        return await retry_idempotent(lambda: self._sender.run(script, keys, packed))

    async def _confirm(self, *proofs: Command) -> None:
        """Wait until a replica has the writes that `proofs` read, if there is a replica. Raises: RedisError."""
        await self._confirmer.confirm(*proofs)

    async def close(self) -> None:
        await self._confirmer.close()
        await self._sender.close()
