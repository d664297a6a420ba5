"""Where kernels are tested: on a GPU if there is one, else in Triton's interpreter, for which `conftest` asks."""

import warnings
from types import ModuleType

import pytest
import torch


def has_gpu() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch complains of a driver without a device
        return torch.cuda.is_available()


DEVICE = torch.device("cuda" if has_gpu() else "cpu")


def import_kernels(operator: str) -> ModuleType:
    """The kernels of an operator; the tests that want it are skipped where triton is not installed."""
    pytest.importorskip("triton", reason="kernels are tested where triton is installed")
    return pytest.importorskip(f"engines.torch_backend.ops.{operator}.triton")
