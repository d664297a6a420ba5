"""The gateway's end of the queue: put requests in, take them back, ask how they stand.

Calls of one loop turn travel in one write.
"""

import asyncio
from collections.abc import Sequence
from secrets import token_hex

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from shared.protocol import Envelope, Priority
from shared.queue.api import (
    Bounds,
    DuplicateRequest,
    QueueRefused,
    QueueStats,
    QueueUnavailable,
    RequestState,
)
from shared.queue.keys import AFTER_DEADLINE_S, AFTER_END_S, GROUP, QUEUE_TTL_S, RedisKeys, to_ms
from shared.queue.scripts import CANCEL, ENQUEUE, FORGET_LOST, LISTEN, SETTLE, named
from shared.redis.client import redis_errors_as, retry_idempotent
from shared.redis.link import RedisSender

_MAX_FORGOTTEN = 100  #: at once


class RedisGatewayQueue:
    """All models' queues under one key prefix: a `GatewayQueue`."""

    def __init__(self, redis: Redis, keys_prefix: str) -> None:
        self._keys = RedisKeys(keys_prefix)
        self._sender = RedisSender(redis)

    @redis_errors_as(QueueUnavailable)
    async def submit(
        self,
        choices: Sequence[Envelope],
        *,
        timeout_s: float,
        num_tokens: int,
        bounds: Bounds,
        num_held_tokens: int = 0,
    ) -> None:
        """See `GatewayQueue.submit`."""
        keys, arguments = self._to_call(choices, timeout_s, num_tokens, num_held_tokens, bounds)
        verdict = await retry_idempotent(lambda: self._sender.run(ENQUEUE, keys, arguments))
        if verdict[0] == b"queue_full" and await self._forget_lost(choices[0]):
            verdict = await retry_idempotent(lambda: self._sender.run(ENQUEUE, keys, arguments))
        if verdict[0] == b"duplicate":
            raise DuplicateRequest(f"request {choices[0].id} exists already")
        if verdict[0] != b"ok":
            raise QueueRefused(verdict[0].decode(), verdict[1] / 1000)

    async def _forget_lost(self, refused: Envelope) -> bool:
        """Whether requests stood before it in the backlog that nobody came for in time. Raises: RedisError."""
        if refused.priority is not Priority.BATCH:
            return False
        keys = (self._keys.backlog(refused.model),)
        arguments = named(requests=self._keys.requests(refused.model), count=_MAX_FORGOTTEN)
        return await self._sender.run(FORGET_LOST, keys, arguments) > 0

    def _to_call(
        self,
        choices: Sequence[Envelope],
        timeout_s: float,
        num_tokens: int,
        num_held_tokens: int,
        bounds: Bounds,
    ) -> tuple[list[str], tuple[bytes, ...]]:
        first = choices[0]
        keys = self._shared_keys(first.model)
        keys.append(self._keys.rates(first.model, first.tenant))
        keys += [self._keys.request(choice.model, choice.id) for choice in choices]
        arguments = named(
            *(choice.payload for choice in choices),
            nonce=token_hex(8),
            group=GROUP,
            timeout_ms=to_ms(timeout_s),
            keep_ms=to_ms(AFTER_DEADLINE_S),
            queue_ttl_ms=to_ms(QUEUE_TTL_S),
            reply_to=first.reply_to,
            is_batch=first.priority is Priority.BATCH,
            tenant=first.tenant,
            max_waiting=bounds.max_waiting,
            max_tokens=bounds.max_tokens,
            held_tokens=num_held_tokens or num_tokens,
            taken_tokens=num_tokens,
            max_tenant_requests=bounds.max_tenant_requests,
            requests_per_minute=bounds.max_tenant_requests_per_minute,
            tokens_per_minute=bounds.max_tenant_tokens_per_minute,
            ids=[choice.id for choice in choices],
        )
        return keys, arguments

    def _shared_keys(self, model: str) -> list[str]:
        keys = self._keys
        return [keys.queue(model), keys.backlog(model), keys.places(model), keys.held(model)]

    @redis_errors_as(QueueUnavailable)
    async def cancel(self, model: str, request_ids: Sequence[str]) -> None:
        """See `GatewayQueue.cancel`."""
        keys = self._shared_keys(model)
        for request_id in request_ids:
            keys += (self._keys.request(model, request_id), self._keys.log(model, request_id))
        arguments = named(group=GROUP, keep_ms=to_ms(AFTER_END_S))
        await retry_idempotent(lambda: self._sender.run(CANCEL, keys, arguments))

    @redis_errors_as(QueueUnavailable)
    async def settle(
        self,
        model: str,
        tenant: str,
        request_ids: Sequence[str],
        *,
        num_taken: int,
        tokens_per_minute: int,
    ) -> bool:
        """Let a tenant's minute know what answers came to, for each of which `num_taken` tokens were taken.

        False if one of them has not ended, and this is to be called again. Raises: QueueUnavailable.
        """
        keys = [self._keys.rates(model, tenant)]
        keys += [self._keys.request(model, request_id) for request_id in request_ids]
        arguments = named(tokens_per_minute=tokens_per_minute, taken_tokens=num_taken)
        return await retry_idempotent(lambda: self._sender.run(SETTLE, keys, arguments)) == 1

    @redis_errors_as(QueueUnavailable)
    async def state(self, model: str, request_id: str) -> RequestState | None:
        """See `GatewayQueue.state`."""
        key = self._keys.request(model, request_id)
        fields, ttl_ms = await asyncio.gather(  # in one write
            self._ask("HMGET", key, "state", "attempt", "tokens"), self._ask("PTTL", key)
        )
        if fields[0] is None or ttl_ms < 0:
            return None
        return _to_state(fields[0], int(fields[1]), int(fields[2]), ttl_ms)

    @redis_errors_as(QueueUnavailable)
    async def listen(self, model: str, request_id: str, gateway_id: str) -> RequestState | None:
        """See `GatewayQueue.listen`."""
        keys, arguments = (self._keys.request(model, request_id),), named(gateway=gateway_id)
        found = await retry_idempotent(lambda: self._sender.run(LISTEN, keys, arguments))
        return _to_state(*found) if found else None

    @redis_errors_as(QueueUnavailable)
    async def events(self, model: str, request_id: str) -> list[bytes]:
        """See `GatewayQueue.events`."""
        return await self._ask("LRANGE", self._keys.log(model, request_id), 0, -1)

    @redis_errors_as(QueueUnavailable)
    async def stats(self, model: str) -> QueueStats:
        """See `GatewayQueue.stats`."""
        num_given, num_backlog, age_s = await asyncio.gather(
            self._ask("XLEN", self._keys.queue(model)),
            self._ask("XLEN", self._keys.backlog(model)),
            self._age_s(model),
        )
        return QueueStats(num_given + num_backlog, num_backlog, age_s)

    async def _age_s(self, model: str) -> float:
        queue = self._keys.queue(model)
        try:
            pending = await self._ask("XPENDING", queue, GROUP)
            begin = b"(" + pending[2] if pending[2] else "-"  # what was read and ended is deleted
        except ResponseError:  # no worker has ever read
            begin = "-"
        entries = await self._ask("XRANGE", queue, begin, "+", "COUNT", 10)
        oldest = [entry_id for entry_id, fields in entries if fields[0] == b"id"]  # no nudge
        if not oldest:
            return 0.0
        seconds, microseconds = await self._ask("TIME")
        added_at = int(oldest[0].partition(b"-")[0]) / 1000
        return max(0.0, int(seconds) + int(microseconds) / 1e6 - added_at)

    @redis_errors_as(QueueUnavailable)
    async def remember(self, request_id: str, note: bytes, ttl_s: float) -> bool:
        """Keep a gateway's note on a request; False if there is one already. Raises: QueueUnavailable.

        Sent once: if only the reply is lost, the request counts as sent before, and is followed.
        """
        command = ("SET", self._keys.stream(request_id), note, "NX", "PX", to_ms(ttl_s))
        return await self._sender.execute(*command) is not None

    @redis_errors_as(QueueUnavailable)
    async def recall(self, request_id: str) -> bytes | None:
        """The note on a request, if there is one. Raises: QueueUnavailable."""
        return await self._ask("GET", self._keys.stream(request_id))

    @redis_errors_as(QueueUnavailable)
    async def forget(self, request_id: str) -> None:
        """Drop the note on a request. Raises: QueueUnavailable."""
        await self._ask("DEL", self._keys.stream(request_id))

    @redis_errors_as(QueueUnavailable)
    async def open(self) -> None:
        """Connect now rather than at the first request."""
        await self._sender.execute("TIME")

    async def close(self) -> None:
        """Hang up."""
        await self._sender.close()

    async def _ask(self, *command: str | bytes | int):
        return await retry_idempotent(lambda: self._sender.execute(*command))


def _to_state(state: bytes, attempt: int, num_tokens: int, ttl_ms: int) -> RequestState:
    name = state.decode()
    after_s = AFTER_DEADLINE_S if name in ("queued", "running") else 0.0
    return RequestState(name, attempt, num_tokens, ttl_ms / 1000 - after_s)
