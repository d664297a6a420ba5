"""The device of kernel tests: a GPU if there is one, otherwise Triton's interpreter, which `conftest` enables."""

import warnings
from types import ModuleType
from typing import Any

import pytest
import torch


def has_gpu() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about a driver without a device
        return torch.cuda.is_available()


_NUMBERS = ("num_heads", "num_kv_heads", "head_dim", "hidden_size", "intermediate_size")
#: Decoders of real models that use different parts of the kernels: grouped and odd heads, wide heads, few heads.
REAL_SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_NUMBERS, numbers, strict=True))
    for name, *numbers in (
        ("llava-1.5-7b", 32, 32, 128, 4096, 11008),
        ("qwen2.5-vl-3b", 16, 2, 128, 2048, 11008),
        ("qwen3-vl-4b", 32, 8, 128, 2560, 9728),
        ("smolvlm2-500m", 15, 5, 64, 960, 2560),
        ("gemma-3-4b", 8, 4, 256, 2560, 10240),
        ("internvl3-1b", 14, 2, 64, 896, 4864),
    )
}
DEVICE = torch.device("cuda" if has_gpu() else "cpu")


def import_kernels(operator: str) -> ModuleType:
    """Returns the kernels of an operator; skips the test if triton is not installed."""
    pytest.importorskip("triton", reason="kernels are tested where triton is installed")
    return pytest.importorskip(f"engines.torch_backend.ops.{operator}.triton")
