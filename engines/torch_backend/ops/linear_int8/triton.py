"""Products of a few rows with int8 weights, which become numbers in registers, just before they are used.

A program computes some outputs for all rows, so that every weight is read once; sums are kept in float32, and their
order does not depend on the number of rows beside.

Shape letters: M rows, K inputs, N outputs.
"""

# pyright: reportCallIssue=false
# The launcher takes `num_warps` and `num_stages` beside the kernel's own arguments.
import triton
import triton.language as tl
from torch import Tensor

from engines.torch_backend.ops.triton_types import num_stages, product_dtype

_OUTPUTS = 16  # of a program: small, so that even the narrowest product fills the device
_INPUTS = 256  # read together; a weight's row is contiguous


@triton.jit
def _multiply_int8_kernel(
    x,  # (M, K)
    integers,  # (N, K)
    scale,  # (N,)
    out,  # (M, N)
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """A program computes `BLOCK_N` outputs of all rows."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = n.to(tl.int64)[:, None] * K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inputs = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)  # fmt: skip
        weights = tl.load(integers + rows + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0)  # fmt: skip
        total += tl.dot(inputs.to(PRODUCT), tl.trans(weights.to(PRODUCT)), input_precision="ieee")
    total *= tl.load(scale + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    places = m[:, None] * N + n[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=mask)


def multiply_int8(x: Tensor, integers: Tensor, scale: Tensor) -> Tensor:
    """A few rows. Shapes: x (M, K), integers (N, K), scale (N,); returns (M, N)."""
    num_rows, num_inputs = x.shape
    num_outputs = integers.shape[0]
    out = x.new_empty(num_rows, num_outputs)
    _multiply_int8_kernel[(triton.cdiv(num_outputs, _OUTPUTS),)](
        x.contiguous(),
        integers,
        scale,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_N=_OUTPUTS,
        BLOCK_K=min(_INPUTS, max(16, triton.next_power_of_2(num_inputs))),
        PRODUCT=product_dtype(x.dtype),
        num_warps=4,
        num_stages=num_stages(x),
    )
    return out
