"""Linears over int8 and int4 weights.

Put into the model by `quantization`. They compute by dequantizing a few outputs at a time and multiplying,
which is always right; torch's CPU kernels take over where they are faster and a probe finds them equal to that.

Shape letters: M tokens, K inputs, N outputs, G groups of inputs.
"""

from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.ops.cpu_level import CpuLevel
from engines.torch_backend.parallel.mesh import WHOLE, Share

CHUNK_WEIGHTS = (
    1 << 19
)  # two MB in float32: they stay in the cache between dequantizing and product
_ROW_STEP = 64  # a multiple of every order's block
GROUP_SIZES = (64, 32)
_INT4_BLOCKS = (32, 64)  # outputs that torch's int4 kernel may interleave, by instruction set


class QuantizedLinear(nn.Module, ABC):
    """A linear that computes by dequantizing a few outputs at a time, small enough for the CPU's cache."""

    bias: nn.Parameter | None
    op: str  #: name of the operator that multiplies with such weights

    def __init__(self, bias: Tensor | None, share: Share) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias) if bias is not None else None
        self.max_kernel_tokens = 0  #: up to here torch's kernel computes
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (M, K); returns (M, N)."""
        if x.shape[0] <= self.max_kernel_tokens:
            y = self.compute_with_kernel(x.contiguous())
        elif x.device.type == "cpu":
            y = self._multiply_by_rows(x)
        else:
            y = F.linear(x, self.dequantized())
        return y if self.bias is None else y + self.bias

    def dequantized(self) -> Tensor:
        """Shapes: returns (N, K)."""
        return self._dequantize_rows(0, self._num_outputs)

    def _multiply_by_rows(self, x: Tensor) -> Tensor:
        num_outputs = self._num_outputs
        num_rows = max(_ROW_STEP, CHUNK_WEIGHTS // x.shape[1] // _ROW_STEP * _ROW_STEP)
        y = x.new_empty(x.shape[0], num_outputs)
        for start in range(0, num_outputs, num_rows):
            stop = min(start + num_rows, num_outputs)
            y[:, start:stop] = F.linear(x, self._dequantize_rows(start, stop))
        return y

    @abstractmethod
    def prepare(self, level: CpuLevel) -> None:
        """Use torch's kernel if it is there, right, and faster on this level."""

    @property
    @abstractmethod
    def _num_outputs(self) -> int: ...

    @abstractmethod
    def _dequantize_rows(self, start: int, stop: int) -> Tensor: ...

    @abstractmethod
    def compute_with_kernel(self, x: Tensor) -> Tensor:
        """Torch's kernel, without the bias. Shapes: (M, K); returns (M, N)."""


class Int8Linear(QuantizedLinear):
    """A linear over int8 weights. Shapes: integers (N, K), scale (N,)."""

    op = "linear_int8"
    integers: Tensor
    scale: Tensor

    def __init__(
        self,
        shape: tuple[int, int],
        bias: Tensor | None,
        dtype: torch.dtype,
        share: Share = WHOLE,
    ) -> None:
        super().__init__(bias, share)
        self.register_buffer("integers", torch.empty(shape, dtype=torch.int8, device="meta"))
        self.register_buffer("scale", torch.empty(shape[0], dtype=dtype, device="meta"))

    def prepare(self, level: CpuLevel) -> None:
        """Use torch's kernel if it is there, right, and faster on this level."""
        if self.integers.device.type == "cpu" and has_int8_kernel(self.scale.dtype):
            self.max_kernel_tokens = level.max_torch_int8_tokens

    @property
    def _num_outputs(self) -> int:
        return self.integers.shape[0]

    def _dequantize_rows(self, start: int, stop: int) -> Tensor:
        rows = self.integers[start:stop].to(self.scale.dtype)
        return rows.mul_(self.scale[start:stop, None])

    def compute_with_kernel(self, x: Tensor) -> Tensor:
        """Torch's kernel, without the bias. Shapes: (M, K); returns (M, N)."""
        return torch.ops.aten._weight_int8pack_mm(x, self.integers, self.scale)


class Int4Linear(QuantizedLinear):
    """A linear over pairs of int4 weights: (integer - 8) * scale + zero.

    Shapes: pairs (N, K / 2), in each byte the inputs i and i + half of a group; scale_zero (G, N, 2). Once
    prepared for torch's kernel, `pairs` is in its order: see `unpack_int4`.
    """

    op = "linear_int4"
    pairs: Tensor
    scale_zero: Tensor

    def __init__(
        self,
        shape: tuple[int, int],
        bias: Tensor | None,
        dtype: torch.dtype,
        group_size: int | None = None,
        share: Share = WHOLE,
    ) -> None:
        """`group_size` None: the largest that divides the inputs."""
        super().__init__(bias, share)
        num_outputs, num_inputs = shape
        self.group_size = group_size or choose_group_size(num_inputs) or num_inputs
        groups = (num_inputs // self.group_size, num_outputs, 2)
        pairs = torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8, device="meta")
        self.register_buffer("pairs", pairs)
        self.register_buffer("scale_zero", torch.empty(groups, dtype=dtype, device="meta"))
        #: Outputs that the kernel's order interleaves; None: own order.
        self._block: int | None = None

    def prepare(self, level: CpuLevel) -> None:
        """Reorder the weights for torch's kernel if it is there, right, and faster on this level."""
        max_tokens = level.max_torch_int4_tokens
        if self.pairs.device.type != "cpu" or not max_tokens or self._block is not None:
            return
        block = int4_kernel_block(self.scale_zero.dtype)
        if block is not None and self._num_outputs % block == 0:
            self.pairs = self._reordered()
            self._block = block
            self.max_kernel_tokens = max_tokens

    def _reordered(self) -> Tensor:
        """Some outputs at a time: torch's function wants integers of 32 bits, eight times what the result takes."""
        reordered = torch.empty_like(self.pairs)
        num_rows = max(1, CHUNK_WEIGHTS // (2 * self.pairs.shape[1]) // _ROW_STEP) * _ROW_STEP
        for rows, target in zip(self.pairs.split(num_rows), reordered.split(num_rows), strict=True):
            integers = unpack_pairs(rows, self.group_size).flatten(1)
            target.copy_(pack_int4(integers.to(torch.int32)))
        return reordered

    @property
    def _num_outputs(self) -> int:
        return self.pairs.shape[0]

    def _dequantize_rows(self, start: int, stop: int) -> Tensor:
        pairs = self.pairs[start:stop]
        if self._block is None:
            integers = unpack_pairs(pairs, self.group_size)
        else:
            integers = unpack_int4(pairs, self._block).view(len(pairs), -1, self.group_size)
        scale, zero = self.scale_zero[:, start:stop].transpose(0, 1).unbind(2)
        rows = integers.to(scale.dtype).sub_(8)
        return torch.addcmul(zero[..., None], rows, scale[..., None], out=rows).flatten(1)

    def compute_with_kernel(self, x: Tensor) -> Tensor:
        """Torch's kernel, without the bias. Shapes: (M, K); returns (M, N)."""
        kernel = torch.ops.aten._weight_int4pack_mm_for_cpu
        return kernel(x, self.pairs, self.group_size, self.scale_zero)


def choose_group_size(num_inputs: int) -> int | None:
    """Inputs that share a scale; None where no group divides them."""
    return next((size for size in GROUP_SIZES if num_inputs % size == 0), None)


def pack_pairs(integers: Tensor) -> Tensor:
    """Shapes: (N, G, K / G), values 0..15; returns (N, K / 2)."""
    low, high = integers.chunk(2, dim=2)
    return (low | (high << 4)).flatten(1)


def unpack_pairs(pairs: Tensor, group_size: int) -> Tensor:
    """Shapes: (N, K / 2); returns (N, G, K / G)."""
    groups = pairs.view(pairs.shape[0], -1, group_size // 2)
    return torch.cat([groups & 15, groups >> 4], dim=2)


def pack_int4(integers: Tensor) -> Tensor:
    """The order of torch's CPU kernel. Shapes: int32 (N, K); returns uint8 (N, K / 2)."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers.contiguous(), 1)


def unpack_int4(packed: Tensor, block: int) -> Tensor:
    """What `pack_int4` made, back. Shapes: (N, K / 2), N a multiple of the block; returns (N, K).

    Per block of outputs and per input, the bytes hold the outputs n and n + block / 2.
    """
    num_outputs, half = packed.shape
    blocks = packed.view(num_outputs // block, half * 2, block // 2)
    both = torch.cat([blocks & 15, blocks >> 4], dim=2)
    return both.transpose(1, 2).reshape(num_outputs, half * 2)


@cache
def has_int8_kernel(dtype: torch.dtype) -> bool:
    """Whether torch has its int8 product on this machine, and it is right."""
    linear = Int8Linear((48, 64), None, dtype)
    linear.integers = (_sample(48, 64) * 127).to(torch.int8)
    linear.scale = (_sample(1, 48)[0].abs() + 0.1).to(dtype)
    return _is_right(linear, _sample(3, 64).to(dtype), linear.dequantized())


@cache
def int4_kernel_block(dtype: torch.dtype) -> int | None:
    """How torch's int4 kernel orders outputs on this machine; None where it is absent or wrong."""
    linear = Int4Linear((128, 128), None, dtype)
    linear.pairs = (_sample(128, 64).abs() * 255).to(torch.uint8)
    linear.scale_zero = _sample(2 * 128, 2).view(2, 128, 2).to(dtype)
    expected = linear.dequantized()
    integers = unpack_pairs(linear.pairs, linear.group_size).flatten(1)
    try:
        linear.pairs = pack_int4(integers.to(torch.int32))
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    if not _is_right(linear, _sample(3, 128).to(dtype), expected):
        return None
    known = (b for b in _INT4_BLOCKS if torch.equal(unpack_int4(linear.pairs, b), integers))
    return next(known, None)


def _sample(rows: int, columns: int) -> Tensor:
    """Fixed numbers within -1..1, without touching the random state."""
    return torch.sin(torch.arange(rows * columns, dtype=torch.float32) * 0.7).view(rows, columns)


def _is_right(linear: Int8Linear | Int4Linear, x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel is there and computes what the weights say."""
    try:
        found = linear.compute_with_kernel(x)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    expected = x.float() @ weight.float().t()
    tolerance = 4 * torch.finfo(x.dtype).eps * expected.abs().max() + 1e-5
    return bool(((found.float() - expected).abs() <= tolerance).all())
