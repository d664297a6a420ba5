"""One fleet with the built-in model for all tests here that ask it; it ends with them."""

from collections.abc import Iterator

import pytest

from tests.integration.fleet_process import Served, start_fleet


@pytest.fixture(scope="package")
def shapes_fleet(tmp_path_factory) -> Iterator[Served]:
    served = start_fleet(tmp_path_factory.mktemp("shapes"), engine="torch")
    yield served
    served.end()
