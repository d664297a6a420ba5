"""A fleet that a module of tests may break: Redis, gateways and workers as processes, and clients that note all."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.faults.fleet import Fleet, run_fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory) -> AsyncIterator[Fleet]:
    """One gateway that listens, and no worker yet."""
    async with run_fleet(tmp_path_factory.mktemp("faults")) as fleet:
        yield fleet
