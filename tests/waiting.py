"""Waits for other tasks, threads and processes: until a condition holds, for a limited time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TypeVar

WITHIN_S = 60.0
PAUSE_S = 0.01

Found = TypeVar("Found")


async def until(holds: Callable[[], Awaitable[Found] | Found], within_s: float = WITHIN_S) -> Found:
    """Returns the first true value of `holds`, which can be a coroutine function.

    Raises TimeoutError.
    """
    async with asyncio.timeout(within_s):
        while True:
            value = holds()
            if isawaitable(value):
                value = await value
            if value:
                return value
            await asyncio.sleep(PAUSE_S)


async def until_equal(
    read: Callable[[], Awaitable[Found] | Found], expected: Found, within_s: float = WITHIN_S
) -> None:
    """Returns once `read` returns the expected value."""

    async def is_equal() -> bool:
        value = read()
        return (await value if isawaitable(value) else value) == expected

    await until(is_equal, within_s)


def wait_for(holds: Callable[[], Found], within_s: float = WITHIN_S) -> Found:
    """As `until`, without an event loop, and seldom: conditions of processes take milliseconds to read."""
    give_up_at = time.monotonic() + within_s
    while not (value := holds()):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"not within {within_s:g} s")
        time.sleep(5 * PAUSE_S)
    return value
