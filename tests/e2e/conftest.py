"""One fleet with the built-in model for all tests here that ask it; it ends with them."""

from collections.abc import Iterator

import pytest

from tests.integration.fleet_process import Served, start_fleet


@pytest.fixture(scope="package")
def shapes_fleet(tmp_path_factory) -> Iterator[Served]:
    """With one thread: two wait for each other, and for many times as long where other tests compute beside them."""
    folder = tmp_path_factory.mktemp("shapes")
    served = start_fleet(folder, engine="torch", VLM_ENGINE__NUM_THREADS="1")
    yield served
    served.end()
