"""Clients of Redis with explicit timeouts and no hidden retries.

redis-py's defaults repeat a command whose reply was lost, even if the command is not idempotent, and time out
before a long blocking read returns.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from functools import wraps
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from shared.redis.sentinel import create_sentinel_redis
from shared.settings import SettingsError
from shared.settings.redis_url import SentinelUrl
from shared.settings.tree import RedisSettings

#: Timeout of a blocking read on the server; that of its socket is longer.
BLOCK_S = 2.0

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Coroutine[Any, Any, Any]])

#: Errors after which an idempotent command can be repeated.
TRANSIENT = (ConnectionError, TimeoutError)


def create_redis(settings: RedisSettings, *, blocking: bool = False) -> Redis:
    """A client of the first shard that fails within its timeout, without retries. `blocking`: `BLOCK_S` longer.

    Raises: SettingsError for an unknown option in the URL.
    """
    url = settings.first.url
    options: dict[str, Any] = {
        "socket_timeout": settings.command_timeout_s + (BLOCK_S if blocking else 0.0),
        "socket_connect_timeout": settings.connect_timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
        "protocol": 2,
    }
    if not url.startswith("unix:"):
        options["socket_keepalive"] = True
    if sentinels := SentinelUrl.parse(url):
        redis = create_sentinel_redis(sentinels, options)
    else:
        redis = Redis.from_url(url, **options)
    try:
        redis.connection_pool.make_connection()
    except TypeError as error:
        name = str(error).rpartition(" ")[2]
        raise SettingsError(f"VLM_REDIS_URL: the URL has an unknown option {name}") from None
    return redis


async def retry_idempotent(
    call: Callable[[], Awaitable[Result]], *, attempts: int = 3, longest_pause_s: float = 0.5
) -> Result:
    """Retry an idempotent call. Raises: RedisError of the last try."""
    for attempt in range(attempts - 1):
        try:
            return await call()
        except TRANSIENT:
            await asyncio.sleep(random.random() * min(longest_pause_s, 0.02 * 2**attempt))
    return await call()


def redis_errors_as(kind: Callable[[str], Exception]) -> Callable[[Function], Function]:
    """Decorate a coroutine function to raise `kind` instead of RedisError."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except RedisError as error:
                raise kind(str(error)) from error

        return cast(Function, call)

    return decorate


REMIND_AFTER_S = 60.0
_PAUSE_S = 1.0

logger = logging.getLogger(__name__)


class OutageLog:
    """Logs the retries of one loop, so that an outage is one line instead of one per retry."""

    def __init__(self, address: str, remind_after_s: float = REMIND_AFTER_S) -> None:
        self._address = address
        self._remind_after_s = remind_after_s
        self._logged_at: float | None = None

    def failed(self, error: Exception) -> None:
        now = time.monotonic()
        if self._logged_at is None or now - self._logged_at >= self._remind_after_s:
            self._logged_at = now
            cause = str(error).rstrip(".") or type(error).__name__
            if isinstance(error.__cause__ or error, AuthenticationError):  # redis-py wraps it
                text = "Redis at %s refuses user or password (%s); correct VLM_REDIS_URL"
            else:
                text = "cannot reach Redis at %s (%s); start Redis there, or set VLM_REDIS_URL"
            logger.warning(text + "; retrying", self._address, cause)

    def succeeded(self) -> None:
        if self._logged_at is not None:
            self._logged_at = None
            logger.warning("Redis at %s answers again", self._address)


async def wait_for_redis(settings: RedisSettings) -> None:
    """Wait until Redis answers, even with an error."""
    log = OutageLog(settings.address)
    async with aclosing(create_redis(settings)) as redis:
        while True:
            try:
                with suppress(ResponseError):
                    await redis.time()
                break
            except (*TRANSIENT, OSError) as error:
                log.failed(error)
                await asyncio.sleep(_PAUSE_S)
    log.succeeded()
