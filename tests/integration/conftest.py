"""A fleet shared by a module."""

from collections.abc import Iterator

import pytest

from tests.integration.fleet_process import Served, start_fleet


@pytest.fixture(scope="module")
def served(request, tmp_path_factory) -> Iterator[Served]:
    """Its engine takes the module's `DECODE_S` for a token."""
    decode_s = str(getattr(request.module, "DECODE_S", 0.001))
    fleet = start_fleet(tmp_path_factory.mktemp("serve"), VLM_ENGINE__MOCK__DECODE_S=decode_s)
    yield fleet
    fleet.end()
