"""Where kernels are tested: on a GPU if there is one, else in Triton's interpreter, for which `conftest` asks."""

import warnings
from types import ModuleType
from typing import Any

import pytest
import torch


def has_gpu() -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch complains of a driver without a device
        return torch.cuda.is_available()


#: Decoders of real models, of which kernels have met other parts: grouped and odd heads, wide heads, few of them.
REAL_SHAPES: dict[str, dict[str, Any]] = {
    "llava-1.5-7b": {
        "num_heads": 32, "num_kv_heads": 32, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 11008,
    },
    "qwen2.5-vl-3b": {
        "num_heads": 16, "num_kv_heads": 2, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 11008,
    },
    "qwen3-vl-4b": {
        "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "hidden_size": 2560, "intermediate_size": 9728,
    },
    "smolvlm2-500m": {
        "num_heads": 15, "num_kv_heads": 5, "head_dim": 64, "hidden_size": 960, "intermediate_size": 2560,
    },
    "gemma-3-4b": {
        "num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "hidden_size": 2560, "intermediate_size": 10240,
    },
    "internvl3-1b": {
        "num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "hidden_size": 896, "intermediate_size": 4864,
    },
}  # fmt: skip
DEVICE = torch.device("cuda" if has_gpu() else "cpu")


def import_kernels(operator: str) -> ModuleType:
    """The kernels of an operator; the tests that want it are skipped where triton is not installed."""
    pytest.importorskip("triton", reason="kernels are tested where triton is installed")
    return pytest.importorskip(f"engines.torch_backend.ops.{operator}.triton")
