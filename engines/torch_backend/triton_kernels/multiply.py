"""Products of a few rows with int8 or int4 weights, which become numbers in registers, just before they are used.

Twins: `decoder_ops.multiply_int8` and `multiply_int4`. A program computes some outputs for all rows, so that
every weight is read once; sums are kept in float32, and their order does not depend on the number of rows beside.

Shape letters: M rows, K inputs, N outputs, G groups of inputs.
"""

# pyright: reportCallIssue=false
# The launcher takes `num_warps` and `num_stages` beside the kernel's own arguments.
import triton
import triton.language as tl
from torch import Tensor

from engines.torch_backend.triton_kernels.products import product_dtype

#: rows up to which reading the weights is what takes the time; above, they are made into a matrix first
MAX_ROWS = 64
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


@triton.jit
def _multiply_int4_kernel(
    x,  # (M, K)
    pairs,  # (N, K / 2)
    scale_zero,  # (G, N, 2)
    out,  # (M, N)
    M,
    N,
    K,
    HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """A program computes `BLOCK_N` outputs of all rows, group by group of 2 `HALF` inputs."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, HALF)
    row_mask = (m < M)[:, None]
    rows = n.to(tl.int64)[:, None] * (K // 2)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for group in range(0, K // (2 * HALF)):
        places = x + m[:, None] * K + (group * 2 * HALF + i)[None, :]
        left = tl.load(places, mask=row_mask, other=0.0)
        right = tl.load(places + HALF, mask=row_mask, other=0.0)
        both = tl.load(pairs + rows + (group * HALF + i)[None, :], mask=(n < N)[:, None], other=0)
        low = ((both & 15).to(tl.int8) - 8).to(PRODUCT)
        high = ((both >> 4).to(tl.int8) - 8).to(PRODUCT)
        product = tl.dot(left.to(PRODUCT), tl.trans(low), input_precision="ieee")
        product += tl.dot(right.to(PRODUCT), tl.trans(high), input_precision="ieee")
        # scale and zero belong to the group: they are applied to its sum, not to each weight
        parameters = scale_zero + (group * N + n) * 2
        scale = tl.load(parameters, mask=n < N, other=0.0).to(tl.float32)
        zero = tl.load(parameters + 1, mask=n < N, other=0.0).to(tl.float32)
        sums = tl.sum(left.to(tl.float32), axis=1) + tl.sum(right.to(tl.float32), axis=1)
        total += product * scale[None, :] + sums[:, None] * zero[None, :]
    mask = row_mask & (n < N)[None, :]
    tl.store(out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=mask)


def multiply_int8(x: Tensor, integers: Tensor, scale: Tensor) -> Tensor:
    """Up to `MAX_ROWS` rows. Shapes: x (M, K), integers (N, K), scale (N,); returns (M, N)."""
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
        num_stages=4,
    )
    return out


def multiply_int4(x: Tensor, pairs: Tensor, scale_zero: Tensor) -> Tensor:
    """Up to `MAX_ROWS` rows. Shapes: x (M, K), pairs (N, K / 2), scale_zero (G, N, 2); returns (M, N)."""
    num_rows, num_inputs = x.shape
    num_groups, num_outputs, _ = scale_zero.shape
    out = x.new_empty(num_rows, num_outputs)
    _multiply_int4_kernel[(triton.cdiv(num_outputs, _OUTPUTS),)](
        x.contiguous(),
        pairs,
        scale_zero,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        HALF=num_inputs // num_groups // 2,
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_N=_OUTPUTS,
        PRODUCT=product_dtype(x.dtype),
        num_warps=4,
        num_stages=4,
    )
    return out
