"""Two gateways whose keys are stored in Redis and in a store."""

from collections.abc import AsyncIterator

import pytest

from tests.factories_keys import Team, run_team


@pytest.fixture
async def team(redis_server, redis_prefix, tmp_path) -> AsyncIterator[Team]:
    async with run_team(redis_server, redis_prefix, f"file://{tmp_path}/store") as team:
        yield team
