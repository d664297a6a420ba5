"""A small checkpoint that is written once."""

import shutil
from pathlib import Path

import pytest

from benchmarks.make_checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "tiny"
    make_checkpoint("tiny", directory)
    return directory


@pytest.fixture
def tiny(made: Path, tmp_path: Path) -> Path:
    """A copy that a test can change."""
    return Path(shutil.copytree(made, tmp_path / "tiny"))
