"""Lets torchvision be imported where its compiled operators cannot be loaded.

`pip install torchvision` installs the CUDA build on Linux, whose library does not load beside a CPU build of torch.
torchvision tolerates that, but its import then describes two operators that are not declared, and fails.
"""

import importlib.util
from pathlib import Path

import torch

#: As declared in C++ (torchvision/csrc/ops/nms.cpp and ops/quantized/cpu/qnms_kernel.cpp).
_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_missing_operators() -> None:
    """Load torchvision's operators, or declare those that its import describes. Idempotent."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(library))
    except OSError:
        for name in _OPERATORS:
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", _SCHEMA)
