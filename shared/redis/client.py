"""Clients of Redis with explicit timeouts and no hidden retries.

redis-py's defaults repeat a command whose reply was lost, which doubles what is not idempotent, and give up
before a long blocking read returns. Nothing here knows keys or what scripts mean.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from shared.settings.tree import RedisSettings

#: How long a blocking read waits on the server; its socket waits longer than that.
BLOCK_S = 2.0

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Coroutine[Any, Any, Any]])

#: The call may not have reached Redis, or its reply was lost: safe to repeat if it is idempotent.
TRANSIENT = (ConnectionError, TimeoutError)


def create_redis(settings: RedisSettings, *, blocking: bool = False) -> Redis:
    """A client that fails within its timeout and repeats nothing. `blocking`: it may wait `BLOCK_S` on top."""
    keepalive: dict[str, Any] = (
        {} if settings.url.startswith("unix:") else {"socket_keepalive": True}
    )
    return Redis.from_url(
        settings.url,
        socket_timeout=settings.command_timeout_s + (BLOCK_S if blocking else 0.0),
        socket_connect_timeout=settings.connect_timeout_s,
        retry=Retry(NoBackoff(), 0),
        health_check_interval=0,
        protocol=2,
        **keepalive,
    )


async def retry_idempotent(
    call: Callable[[], Awaitable[Result]], *, attempts: int = 3, longest_pause_s: float = 0.5
) -> Result:
    """Repeat a call that is safe to repeat. Raises: RedisError of the last try."""
    for attempt in range(attempts - 1):
        try:
            return await call()
        except TRANSIENT:
            await asyncio.sleep(random.random() * min(longest_pause_s, 0.02 * 2**attempt))
    return await call()


def redis_errors_as(kind: Callable[[str], Exception]) -> Callable[[Function], Function]:
    """Make a coroutine function raise `kind` where Redis fails, so that its callers need not know Redis."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except RedisError as error:
                raise kind(str(error)) from error

        return cast(Function, call)

    return decorate
