"""Products of a few rows with int8 or int4 weights, which are dequantized in registers.

A program computes some outputs for all rows, so that every weight is read once. Sums are float32, and their order does
not depend on the number of rows.

Shape letters: M rows, K inputs, N outputs, G groups of inputs.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from engines.torch_backend.ops.triton_types import product_dtype

_OUTPUTS = 16  # per program: few, so that even the narrowest product fills the device
_INPUTS = 256  # int8 inputs per iteration: many, because a row of weights is contiguous
_GROUPS = 4  # groups of 64 int4 inputs per iteration


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
    """Multiply a few rows by int8 weights. Shapes: x (M, K), integers (N, K), scale (N,); returns (M, N)."""
    block = min(_INPUTS, max(16, triton.next_power_of_2(x.shape[1])))
    return _launch(_multiply_int8_kernel, x, (integers, scale), len(integers), BLOCK_K=block)


@triton.jit
def _multiply_int4_kernel(
    x,  # (M, K)
    pairs,  # (N, K / 2)
    scale_zero,  # (K / (2 HALF), N, 2)
    out,  # (M, N)
    M,
    N,
    K,
    HALF: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """A program computes `BLOCK_N` outputs of all rows, `GROUPS` groups of 2 `HALF` inputs per iteration."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask = (m < M)[:, None]
    output_mask = (n < N)[:, None]
    rows = n.to(tl.int64)[:, None] * (K // 2)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, K // (2 * HALF), GROUPS):
        i = first * HALF + tl.arange(0, GROUPS * HALF)  # index of the pair in its row
        inside = (i < K // 2)[None, :]
        left_places = x + m[:, None] * K + ((i // HALF) * HALF + i)[None, :]
        left = tl.load(left_places, mask=row_mask & inside, other=0.0)
        right = tl.load(left_places + HALF, mask=row_mask & inside, other=0.0)
        both = tl.load(pairs + rows + i[None, :], mask=output_mask & inside, other=0)
        groups = first + tl.arange(0, GROUPS)
        parameters = scale_zero + (groups[None, :] * N + n[:, None]) * 2
        known = output_mask & (groups < K // (2 * HALF))[None, :]
        scale = tl.load(parameters, mask=known, other=0.0).to(tl.float32)
        zero = tl.load(parameters + 1, mask=known, other=0.0).to(tl.float32)
        scale = _for_each_pair(scale, GROUPS, HALF, BLOCK_N)
        zero = _for_each_pair(zero, GROUPS, HALF, BLOCK_N)
        low = ((both & 15).to(tl.float32) - 8.0) * scale + zero
        high = ((both >> 4).to(tl.float32) - 8.0) * scale + zero
        total += tl.dot(left.to(PRODUCT), tl.trans(low.to(PRODUCT)), input_precision="ieee")
        total += tl.dot(right.to(PRODUCT), tl.trans(high.to(PRODUCT)), input_precision="ieee")
    mask = row_mask & (n < N)[None, :]
    tl.store(out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _for_each_pair(x, GROUPS: tl.constexpr, HALF: tl.constexpr, BLOCK_N: tl.constexpr):
    """Repeat the value of each group for its pairs. Shapes: (n, GROUPS); returns (n, GROUPS * HALF)."""
    spread = tl.broadcast_to(x[:, :, None], [BLOCK_N, GROUPS, HALF])
    return tl.reshape(spread, [BLOCK_N, GROUPS * HALF])


def multiply_int4(x: Tensor, pairs: Tensor, scale_zero: Tensor) -> Tensor:
    """Multiply a few rows by int4 weights. Shapes: x (M, K), pairs (N, K / 2), scale_zero (G, N, 2); returns (M, N)."""
    num_groups, num_outputs, _ = scale_zero.shape
    constants = {
        "HALF": x.shape[1] // num_groups // 2,
        "GROUPS": min(_GROUPS, triton.next_power_of_2(num_groups)),
    }
    return _launch(_multiply_int4_kernel, x, (pairs, scale_zero), num_outputs, **constants)


def _launch(
    kernel: Any, x: Tensor, weights: tuple[Tensor, Tensor], num_outputs: int, **constants: Any
) -> Tensor:
    """Shapes: x (M, K); returns (M, N)."""
    num_rows, num_inputs = x.shape
    out = x.new_empty(num_rows, num_outputs)
    kernel[(triton.cdiv(num_outputs, _OUTPUTS),)](
        x.contiguous(),
        *weights,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        **constants,
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_N=_OUTPUTS,
        PRODUCT=product_dtype(x.dtype),
        num_warps=4,
        # tiles to prefetch: as many as fit the GPU's shared memory
        num_stages=4 if num_rows * x.element_size() <= 64 else 2,
    )
    return out
