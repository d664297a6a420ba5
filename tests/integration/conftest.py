"""A fleet shared by a module."""

from collections.abc import Iterator

import pytest

from tests.integration.fleet_process import Served, start_fleet


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    """Slow enough that an answer is seen to grow."""
    fleet = start_fleet(tmp_path_factory.mktemp("serve"), VLM_ENGINE__MOCK__DECODE_S="0.04")
    yield fleet
    fleet.end()
