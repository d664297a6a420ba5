from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.make_checkpoint import make_checkpoint
from tests.engines.upstream.stand_in import StandIn, run_stand_in


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("upstream") / "tiny"
    make_checkpoint("tiny", directory, seed=3)
    return directory


@pytest.fixture
def server() -> Iterator[StandIn]:
    with run_stand_in() as server:
        yield server
