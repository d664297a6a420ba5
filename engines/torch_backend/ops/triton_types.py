"""Types in Triton kernels."""

import torch
import triton.language as tl
from triton import knobs

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def product_dtype(dtype: torch.dtype) -> tl.dtype:
    """The engine's dtype; float32 in Triton's interpreter, which would read the bits of bfloat16 as integers."""
    if knobs.runtime.interpret:
        return tl.float32
    return _TYPES[dtype]
