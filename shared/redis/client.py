"""Clients of Redis with explicit timeouts and no hidden retries, and a warning of vulnerable servers.

redis-py's defaults repeat a command whose reply was lost, which doubles what is not idempotent, and time out
before a long blocking read returns.

Source: the security advisories of Redis, CVE-2023-41056, CVE-2024-31449 and CVE-2025-49844.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from shared.redis.sentinel import create_sentinel_redis
from shared.settings import SettingsError
from shared.settings.redis_url import SentinelUrl
from shared.settings.tree import RedisSettings

#: Timeout of a blocking read on the server; that of its socket is longer.
BLOCK_S = 2.0
#: The first patch of each release line without these vulnerabilities, by server.
_FIXED_IN = {
    "redis": {(6, 2): 20, (7, 0): 15, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}

logger = logging.getLogger(__name__)

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


def has_known_faults(server: str, version: str) -> bool:
    """Whether a release is vulnerable; False for an unknown server or version."""
    fixed_in = _FIXED_IN.get(server)
    numbers = version.split(".")
    if fixed_in is None or len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        return False
    major, minor, patch = map(int, numbers)
    return (major, minor) < min(fixed_in) or patch < fixed_in.get((major, minor), 0)


async def read_release(redis: Redis) -> tuple[str, str]:
    """The name of the server and its version; empty if unknown."""
    try:
        reply: Any = await redis.execute_command("HELLO")
    except (RedisError, OSError):
        return "", ""
    fields = dict(zip(reply[::2], reply[1::2], strict=True))
    return fields[b"server"].decode(), fields[b"version"].decode()


async def warn_of_known_faults(redis: Redis) -> None:
    """Log a warning if the server is vulnerable, unless it is on a unix socket."""
    if "path" in redis.connection_pool.connection_kwargs:
        return
    server, version = await read_release(redis)
    if has_known_faults(server, version):
        logger.warning(
            "%s %s has known faults: a client with a password can crash it or run code in it. "
            "Install a patched release, see docs/scale.md",
            server.title(),
            version,
        )
