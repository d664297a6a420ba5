"""Without a CUDA device these tests are skipped, each by name."""

import warnings
from collections.abc import Iterator

import pytest
import torch

import engines.torch_backend  # noqa: F401 - before transformers, which imports torchvision


@pytest.fixture(autouse=True)
def exact_cuda() -> Iterator[None]:
    """A device that computes float32 as the CPU does; torch's default rounds what convolutions read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch complains of a driver without a device
        has_device = torch.cuda.is_available()
    if not has_device:
        pytest.skip("needs a CUDA device")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield
