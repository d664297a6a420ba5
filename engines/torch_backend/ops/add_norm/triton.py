"""Add to the residual stream and normalise it, in one pass over the row."""

# pyright: reportCallIssue=false
# The launcher accepts `num_warps` and `num_stages` besides the kernel's arguments.
import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm_kernel(
    x, delta, gain, total, normed, width, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    """A program computes a row of `width` numbers."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    places = tl.program_id(0).to(tl.int64) * width + columns
    row = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        row += tl.load(delta + places, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(total.dtype.element_ty)
        tl.store(total + places, rounded, mask=inside)
        row = rounded.to(tl.float32)  # normalise the rounded value, which the next layer reads
    scale = 1.0 / tl.sqrt(tl.sum(row * row, axis=0) / width + eps)
    weight = tl.load(gain + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + places, (row * scale * weight).to(normed.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The stream plus `delta`, and the RMS norm of this sum. Shapes: x, delta (N, C), gain (C,); returns two (N, C)."""
    x = x.contiguous()
    num_rows, width = x.shape
    total = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(num_rows,)](
        x,
        x if delta is None else delta.contiguous(),
        gain,
        total,
        normed,
        width,
        eps,
        HAS_DELTA=delta is not None,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),
    )
    return total, normed
