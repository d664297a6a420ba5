"""A fleet for one test module: Redis, gateways and workers as processes, and clients that record everything."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.faults.fleet import Fleet, run_fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory) -> AsyncIterator[Fleet]:
    """One listening gateway, and no worker yet."""
    async with run_fleet(tmp_path_factory.mktemp("faults")) as fleet:
        yield fleet
