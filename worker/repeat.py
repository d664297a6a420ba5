"""Loops that outlive an outage of Redis."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from shared.queue.api import QueueUnavailable

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0


async def repeat(body: Callable[[], Awaitable[None]], name: str, every_s: float = 0.0) -> None:
    """Run `body` again and again, `every_s` apart; while Redis fails, with growing pauses."""
    pause_s = 0.0
    while True:
        try:
            await body()
        except (QueueUnavailable, RedisError) as error:
            if pause_s == 0.0:
                logger.warning("cannot %s: %s; trying on", name, error)
            pause_s = min(LONGEST_PAUSE_S, pause_s * 2 or FIRST_PAUSE_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            continue
        if pause_s:
            logger.warning("can %s again", name)
            pause_s = 0.0
        if every_s:
            await asyncio.sleep(every_s)
