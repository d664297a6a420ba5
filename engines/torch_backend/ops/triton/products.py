"""In which type tensor cores multiply. Knows no kernel."""

import torch
import triton.language as tl
from triton import knobs

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def product_dtype(dtype: torch.dtype) -> tl.dtype:
    """The engine's own; Triton's interpreter takes the bits of bfloat16 for integers, so there it is float32."""
    if knobs.runtime.interpret:
        return tl.float32
    return _TYPES[dtype]
