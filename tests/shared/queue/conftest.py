"""A second way to the queue of a test: behind a line that loses replies."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.redis.client import create_redis
from shared.settings.tree import RedisSettings
from tests.factories_queue import Ends
from tests.faults.proxy import FaultProxy, run_proxy


@pytest.fixture
async def proxy(redis_server: str) -> AsyncIterator[FaultProxy]:
    async with run_proxy(Path(redis_server.removeprefix("unix://"))) as proxy:
        yield proxy


@pytest.fixture
async def far(proxy: FaultProxy, redis_prefix: str) -> AsyncIterator[Ends]:
    """Ends of the same queues as `ends`, which reach Redis through `proxy`."""
    settings = RedisSettings(url=proxy.url)
    redis, blocking = create_redis(settings), create_redis(settings, blocking=True)
    far = Ends(redis, blocking, redis_prefix)
    yield far
    await far.close()
    await redis.aclose()
    await blocking.aclose()
