"""Makes torchvision importable where its compiled operators cannot be loaded.

`pip install torchvision` installs the CUDA build on Linux, whose library does not load with a CPU build of torch.
torchvision ignores that, but its import then registers implementations of two undeclared operators, and fails.
"""

import importlib.util
from pathlib import Path

import torch

#: Both operators as declared in C++ (torchvision/csrc/ops/nms.cpp and ops/quantized/cpu/qnms_kernel.cpp).
_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def declare_missing_operators() -> None:
    """Load torchvision's operators, or declare those that its import requires. Idempotent."""
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
