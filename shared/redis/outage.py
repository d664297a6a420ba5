"""Log messages of a Redis outage: once with address and advice, then rarely."""

import asyncio
import logging
import time
from contextlib import aclosing

from redis.exceptions import AuthenticationError, ResponseError

from shared.redis.client import TRANSIENT, create_redis
from shared.settings.tree import RedisSettings

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
                text = "Redis at %s refuses user or password (%s); set those of VLM_REDIS_URL"
            else:
                text = "cannot reach Redis at %s (%s); start Redis there, or set VLM_REDIS_URL"
            logger.warning(text + "; trying on", self._address, cause)

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
                await redis.time()
            except ResponseError:
                break
            except (*TRANSIENT, OSError) as error:
                log.failed(error)
                await asyncio.sleep(_PAUSE_S)
            else:
                break
    log.succeeded()
