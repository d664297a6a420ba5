"""One fleet with both built-in models for all tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.integration.fleet_process import Served, start_fleet


@pytest.fixture(scope="package")
def shapes_fleet(tmp_path_factory) -> Iterator[Served]:
    """One fleet for all questions."""
    folder = tmp_path_factory.mktemp("shapes")
    with start_fleet(folder, "--also", "shapes-clip", engine="torch") as served:
        yield served
