"""Lets torchvision be imported where its compiled operators cannot be loaded.

`pip install torchvision` installs the CUDA build on Linux, whose library does not load beside a CPU build of torch.
torchvision tolerates that, but its import then describes two operators that are not declared, and fails.
"""

import importlib.util
from pathlib import Path

import torch

#: As declared in C++ (torchvision/csrc/ops/nms.cpp and ops/quantized/cpu/qnms_kernel.cpp).
SCHEMAS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def declare_missing_operators() -> None:
    """Declare the operators that torchvision's import describes, unless they exist. Idempotent."""
    if _library_loads():
        return
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name.split("::")[1]):
            torch.library.define(name, schema)


def _library_loads() -> bool:
    """Whether torchvision's operators can be loaded; loads them."""
    if hasattr(torch.ops.torchvision, "roi_align"):
        return True
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    libraries = sorted(Path(spec.origin).parent.glob("_C*.so"))
    try:
        for library in libraries:
            torch.ops.load_library(str(library))
    except OSError:
        return False
    return bool(libraries)
