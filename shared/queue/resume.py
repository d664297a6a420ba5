"""Calls that outlive their connection: records by which any gateway finds them again, and more who listen."""

from typing import Protocol

from redis.asyncio import Redis

from shared.queue.api import QueueUnavailable, RequestState
from shared.queue.keys import RedisKeys, keys_of_calls, to_ms
from shared.queue.scripts import FORGET_FAILED, LISTEN, named
from shared.queue.submit import to_state
from shared.redis.client import redis_errors_as, retry_idempotent
from shared.redis.link import RedisSender


class ResumableCalls(Protocol):
    """What gateways know of calls that they did not submit. All methods raise QueueUnavailable."""

    async def remember(self, request_id: str, record: bytes, ttl_s: float) -> bool:
        """Keep a gateway's record of a request; False if there is one already."""
        ...

    async def replace(self, request_id: str, record: bytes, ttl_s: float) -> None:
        """Change the record of a request that is remembered."""
        ...

    async def recall(self, request_id: str) -> bytes | None:
        """The record of a request, if there is one."""
        ...

    async def forget(self, request_id: str) -> None:
        """Drop the record of a request."""
        ...

    async def forget_failed(self, model: str, request_id: str) -> None:
        """Drop a call that has failed, with its log: its id is free again. Others stay."""
        ...

    async def listen(self, model: str, request_id: str, gateway_id: str) -> RequestState | None:
        """How a call stands; while it is open, its events go to this gateway's mailbox too."""
        ...


class RedisResumableCalls:
    """The records and listeners under one key prefix: `ResumableCalls`."""

    def __init__(self, redis: Redis, keys_prefix: str) -> None:
        self._keys = RedisKeys(keys_prefix)
        self._sender = RedisSender(redis)

    @redis_errors_as(QueueUnavailable)
    async def remember(self, request_id: str, record: bytes, ttl_s: float) -> bool:
        """See `ResumableCalls.remember`.

        Sent once: if only the reply is lost, the request counts as sent before, and is followed.
        """
        command = ("SET", self._keys.stream(request_id), record, "NX", "PX", to_ms(ttl_s))
        return await self._sender.execute(*command) is not None

    @redis_errors_as(QueueUnavailable)
    async def replace(self, request_id: str, record: bytes, ttl_s: float) -> None:
        command = ("SET", self._keys.stream(request_id), record, "XX", "PX", to_ms(ttl_s))
        await retry_idempotent(lambda: self._sender.execute(*command))

    @redis_errors_as(QueueUnavailable)
    async def recall(self, request_id: str) -> bytes | None:
        key = self._keys.stream(request_id)
        return await retry_idempotent(lambda: self._sender.execute("GET", key))

    @redis_errors_as(QueueUnavailable)
    async def forget(self, request_id: str) -> None:
        key = self._keys.stream(request_id)
        await retry_idempotent(lambda: self._sender.execute("DEL", key))

    @redis_errors_as(QueueUnavailable)
    async def forget_failed(self, model: str, request_id: str) -> None:
        keys = keys_of_calls(self._keys, model, [request_id])
        await retry_idempotent(lambda: self._sender.run(FORGET_FAILED, keys, named()))

    @redis_errors_as(QueueUnavailable)
    async def listen(self, model: str, request_id: str, gateway_id: str) -> RequestState | None:
        keys, arguments = (self._keys.request(model, request_id),), named(gateway=gateway_id)
        found = await retry_idempotent(lambda: self._sender.run(LISTEN, keys, arguments))
        return to_state(*found) if found else None

    async def close(self) -> None:
        await self._sender.close()
