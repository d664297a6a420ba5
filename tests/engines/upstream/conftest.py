from collections.abc import Iterator

import pytest

from tests.engines.upstream.stand_in import StandIn, run_stand_in


@pytest.fixture
def server() -> Iterator[StandIn]:
    with run_stand_in() as server:
        yield server
