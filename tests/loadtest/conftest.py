"""Fixtures: a scripted server."""

from collections.abc import Iterator

import pytest

from tests.loadtest.fake_server import FakeServer, run_fake_server


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with run_fake_server() as server:
        yield server
