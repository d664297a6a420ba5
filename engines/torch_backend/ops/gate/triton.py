"""SiLU of the first half of each row, times the second half. Source: Shazeer 2020 (SwiGLU)."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _gate_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    """A program computes `BLOCK` numbers of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    product = activated * up.to(tl.float32)
    tl.store(out + row * width + columns, product.to(out.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor) -> Tensor:
    """Shapes: (N, 2 F), the gate's half first; returns (N, F)."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    block = min(_BLOCK, triton.next_power_of_2(width))
    _gate_kernel[(num_rows, triton.cdiv(width, block))](
        gate_up.contiguous(), out, width, BLOCK=block
    )
    return out
