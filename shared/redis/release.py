"""Whether a Redis server is a release with faults by which its users can crash it or run code in it.

Source: the security advisories of Redis, CVE-2023-41056, CVE-2024-31449 and CVE-2025-49844.
"""

import logging
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

#: The first patch of each line without them. Distributions fix 7.0.15 under that number.
_FIXED_IN = {(6, 2): 20, (7, 0): 15, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2}

logger = logging.getLogger(__name__)


def has_known_faults(version: str) -> bool:
    """Whether a release is too old for its line; False for what is no version."""
    numbers = version.split(".")
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        return False
    major, minor, patch = map(int, numbers)
    return (major, minor) < min(_FIXED_IN) or patch < _FIXED_IN.get((major, minor), 0)


async def read_release(redis: Redis) -> str | None:
    """The version of a Redis server; None of another kind of server, or where it is not told."""
    try:
        reply: Any = await redis.execute_command("HELLO")
    except (RedisError, OSError):
        return None
    fields = dict(zip(reply[::2], reply[1::2], strict=True))
    return fields[b"version"].decode() if fields.get(b"server") == b"redis" else None


async def warn_of_known_faults(redis: Redis) -> None:
    """Say so once, unless nobody but the owner of a unix socket could use them."""
    if "path" in redis.connection_pool.connection_kwargs:
        return
    version = await read_release(redis)
    if version is not None and has_known_faults(version):
        logger.warning(
            "Redis %s has known faults by which whoever has a password can crash it or run code "
            "in it: install a patched release, see docs/operating.md",
            version,
        )
