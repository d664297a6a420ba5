"""Lets torchvision be imported where its compiled operators cannot be loaded.

`pip install torchvision` on Linux brings the CUDA build, whose library needs CUDA's own. Beside a CPU build of
torch it does not load; torchvision tolerates that, but then describes two operators that nobody declared, and
its import fails, and with it the import of open_clip and of transformers' image processors. This system
calls none of these operators, so that declaring them is enough. It must run before anything imports
torchvision, hence from this package's `__init__`. Where the library loads, nothing is changed.
"""

import importlib.util
from pathlib import Path

import torch

#: as torchvision declares them in C++ (torchvision/csrc/ops/nms.cpp and ops/quantized/cpu/qnms_kernel.cpp)
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
    """Whether torchvision's operators are there; loads them when they can be."""
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
