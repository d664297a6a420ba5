"""The gateway's end of the queue: put requests in, take them back, ask how they stand.

Calls of one loop turn travel in one write. It must not know HTTP or what becomes of the events.
"""

from dataclasses import dataclass
from secrets import token_hex

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from shared.protocol import GenerateEvent, GenerateRequest, decode_events, encode
from shared.redis_client import retry_idempotent
from shared.redis_keys import AFTER_DEADLINE_S, AFTER_END_S, GROUP, QUEUE_TTL_S, RedisKeys, to_ms
from shared.redis_link import RedisSender
from shared.scripts import CANCEL, ENQUEUE


class QueueError(Exception):
    """Base of the reasons for which a request is not in the queue."""


class QueueFull(QueueError):
    """As many requests wait as may."""


class DuplicateRequest(QueueError):
    """A request with this id is known already."""


class QueueUnavailable(QueueError):
    """Redis cannot be reached or takes no more data; nothing is known to be queued."""


@dataclass(frozen=True, slots=True)
class RequestState:
    """How a request stands. `state`: queued, running, finished, failed or cancelled."""

    state: str
    attempt: int
    num_output_tokens: int  #: accepted so far
    remaining_s: float  #: until the deadline; after the end: until it is forgotten


class RequestQueue:
    """All models' queues under one key prefix."""

    def __init__(self, redis: Redis, keys_prefix: str) -> None:
        self._keys = RedisKeys(keys_prefix)
        self._sender = RedisSender(redis)

    async def enqueue(self, request: GenerateRequest, *, timeout_s: float, max_depth: int) -> None:
        """Queue a request; its deadline is `timeout_s` from now by Redis's clock.

        Raises: QueueFull, DuplicateRequest, QueueUnavailable.
        """
        keys = (
            self._keys.queue(request.model),
            self._keys.request(request.model, request.request_id),
        )
        arguments = (
            request.request_id,
            token_hex(8),
            max_depth,
            to_ms(timeout_s),
            to_ms(AFTER_DEADLINE_S),
            to_ms(QUEUE_TTL_S),
            GROUP,
            request.reply_to,
            encode(request),
        )
        try:
            verdict = await retry_idempotent(lambda: self._sender.run(ENQUEUE, keys, arguments))
        except RedisError as error:
            raise QueueUnavailable(str(error)) from error
        if verdict == b"full":
            raise QueueFull(f"{max_depth} requests are waiting")
        if verdict == b"duplicate":
            raise DuplicateRequest(f"request {request.request_id} exists already")

    async def cancel(self, model: str, request_ids: list[str]) -> None:
        """Cancel requests, whatever their state; unknown and ended ones are ignored.

        Raises: QueueUnavailable.
        """
        keys = [self._keys.queue(model)]
        for request_id in request_ids:
            keys += (self._keys.request(model, request_id), self._keys.log(model, request_id))
        arguments = (GROUP, to_ms(AFTER_END_S))
        try:
            await retry_idempotent(lambda: self._sender.run(CANCEL, keys, arguments))
        except RedisError as error:
            raise QueueUnavailable(str(error)) from error

    async def state(self, model: str, request_id: str) -> RequestState | None:
        """How a request stands; None if Redis knows nothing of it. Raises: QueueUnavailable."""
        key = self._keys.request(model, request_id)
        fields = await self._ask("HMGET", key, "state", "attempt", "tokens")
        ttl_ms = await self._ask("PTTL", key)
        if fields[0] is None or ttl_ms < 0:
            return None
        state = fields[0].decode()
        after_s = AFTER_DEADLINE_S if state in ("queued", "running") else 0.0
        return RequestState(state, int(fields[1]), int(fields[2]), ttl_ms / 1000 - after_s)

    async def events(self, model: str, request_id: str) -> tuple[GenerateEvent, ...]:
        """Every event of a request that was accepted so far, in order: repairs a gap in the mailbox.

        Raises: QueueUnavailable.
        """
        log = await self._ask("LRANGE", self._keys.log(model, request_id), 0, -1)
        return decode_events(b"[" + b",".join(log) + b"]")

    async def events_after(
        self, model: str, request_id: str, num_items: int
    ) -> tuple[int, tuple[GenerateEvent, ...]]:
        """How many items a request's log has beyond so many, and their events. Raises: QueueUnavailable."""
        log = await self._ask("LRANGE", self._keys.log(model, request_id), num_items, -1)
        return len(log), decode_events(b"[" + b",".join(log) + b"]")

    async def age_s(self, model: str) -> float:
        """How long the oldest entry waits that no worker has read; 0 without one. Raises: QueueUnavailable."""
        queue = self._keys.queue(model)
        try:
            pending = await retry_idempotent(lambda: self._sender.execute("XPENDING", queue, GROUP))
            begin = b"(" + pending[2] if pending[2] else "-"  # what was read and ended is deleted
        except ResponseError:  # no worker has ever read
            begin = "-"
        except RedisError as error:
            raise QueueUnavailable(str(error)) from error
        oldest = await self._ask("XRANGE", queue, begin, "+", "COUNT", 1)
        if not oldest:
            return 0.0
        seconds, microseconds = await self._ask("TIME")
        added_at = int(oldest[0][0].partition(b"-")[0]) / 1000
        return max(0.0, int(seconds) + int(microseconds) / 1e6 - added_at)

    async def remember(self, request_id: str, note: bytes, ttl_s: float) -> bool:
        """Keep a gateway's note on a request; False if there is one already. Raises: QueueUnavailable.

        Sent once: if only the reply is lost, the request counts as sent before, and is followed.
        """
        command = ("SET", self._keys.stream(request_id), note, "NX", "PX", to_ms(ttl_s))
        try:
            return await self._sender.execute(*command) is not None
        except RedisError as error:
            raise QueueUnavailable(str(error)) from error

    async def recall(self, request_id: str) -> bytes | None:
        """The note on a request, if there is one. Raises: QueueUnavailable."""
        return await self._ask("GET", self._keys.stream(request_id))

    async def forget(self, request_id: str) -> None:
        """Drop the note on a request. Raises: QueueUnavailable."""
        await self._ask("DEL", self._keys.stream(request_id))

    async def depth(self, model: str) -> int:
        """Requests in a model's queue, waiting and running. Raises: QueueUnavailable."""
        return await self._ask("XLEN", self._keys.queue(model))

    async def close(self) -> None:
        """Hang up."""
        await self._sender.close()

    async def _ask(self, *command: str | bytes | int):
        try:
            return await retry_idempotent(lambda: self._sender.execute(*command))
        except RedisError as error:
            raise QueueUnavailable(str(error)) from error
