"""Fixtures: a fleet shared by a module, and one that a test may break."""

from collections.abc import Iterator

import pytest

from tests.integration.fleet_process import Served, start_fleet

REDIS_BYTES = 64 * 2**20


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    """Slow enough that an answer is seen to grow."""
    fleet = start_fleet(tmp_path_factory.mktemp("serve"), VLM_ENGINE__MOCK__DECODE_S="0.04")
    yield fleet
    fleet.end()


@pytest.fixture
def fresh(tmp_path) -> Iterator[Served]:
    fleet = start_fleet(tmp_path, VLM_REDIS__MAX_MEMORY_BYTES=str(REDIS_BYTES))
    yield fleet
    fleet.end()
