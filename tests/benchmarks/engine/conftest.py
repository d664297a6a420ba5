"""Imports the package before transformers, which imports torchvision."""

from pathlib import Path

import pytest
import torch

import engines.torch_backend  # noqa: F401
from benchmarks.engine import machine
from benchmarks.make_checkpoint import make_checkpoint

torch.set_num_threads(1)
#: The speed of the machine is measured with a small matrix.
machine._MATRIX_SIDE["cpu"] = 64


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "tiny"
    make_checkpoint("tiny", directory)
    return directory
