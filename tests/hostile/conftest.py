"""One fleet for all attacks."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.hostile.fleet import HostileFleet, run_hostile_fleet


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def fleet(tmp_path_factory) -> AsyncIterator[HostileFleet]:
    async with run_hostile_fleet(tmp_path_factory.mktemp("hostile")) as fleet:
        yield fleet
