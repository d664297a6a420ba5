"""What kernels in Triton's language share, and what they need to be there."""

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def product_dtype(dtype: torch.dtype) -> tl.dtype:
    """The engine's own; Triton's interpreter takes the bits of bfloat16 for integers, so there it is float32."""
    if knobs.runtime.interpret:
        return tl.float32
    return _TYPES[dtype]


def num_stages(x: Tensor) -> int:
    """How many tiles are fetched ahead: as many as the memory of a processor holds."""
    return 4 if x.shape[0] * x.element_size() <= 64 else 2
