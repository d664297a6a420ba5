"""Weight-only quantization of the decoder's linears: int8 per output channel, int4 per group of inputs.

Used by the loader. A scheme is two functions: `quantize_state_dict` turns weights into what `swap_linears`
puts in the place of `nn.Linear`. Embeddings, output head, vision tower and projector keep their precision, and
so does a linear whose width no group divides. Each quantized linear computes by dequantizing and multiplying,
which is always right; torch's CPU kernels take over where a probe finds them equal to that.

Shape letters: M tokens, K inputs, N outputs, G groups of inputs.
"""

import re
from abc import ABC, abstractmethod
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_DECODER_LINEAR = re.compile(
    r"(?:^|\.)layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.weight$"
)
_MAX_KERNEL_TOKENS = 16  # torch's weight-only kernels lose to a dequantized product beyond
_GROUP_SIZES = (64, 32)
_INT4_BLOCKS = (32, 64)  # outputs that torch's int4 kernel may interleave, by instruction set


class Scheme(ABC):
    """A way to keep the decoder's weights in fewer bits. `name` is what the command line calls it."""

    name: str

    def applies_to(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a weight, by its name in a checkpoint or in the model, is quantized."""
        is_decoder = "vision_tower" not in name and _DECODER_LINEAR.search(name) is not None
        return is_decoder and len(shape) == 2 and self._fits(shape)

    def quantize_state_dict(
        self, weights: dict[str, Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Replace the weights that the scheme applies to. `dtype` is that of scales and of the others."""
        quantized: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if self.applies_to(name, tuple(weight.shape)):
                prefix = name.removesuffix("weight")
                for part, tensor in self._quantize(weight.float(), dtype).items():
                    quantized[prefix + part] = tensor
            else:
                quantized[name] = weight.to(dtype)
        return quantized

    def swap_linears(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Put quantized linears in place of those that the scheme applies to, with undefined weights."""
        for name, module in list(model.named_modules()):
            if not isinstance(module, nn.Linear):
                continue
            shape = (module.out_features, module.in_features)
            if self.applies_to(f"{name}.weight", shape):
                parent, _, child = name.rpartition(".")
                linear = self._create_linear(shape, module.bias, dtype)
                setattr(model.get_submodule(parent), child, linear)

    def prepare(self, model: nn.Module) -> None:
        """Bring loaded weights into the form that the fastest correct kernel reads."""
        for module in model.modules():
            if isinstance(module, Int8Linear | Int4Linear):
                module.prepare()

    @abstractmethod
    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """What a quantized weight of this shape occupies."""

    @abstractmethod
    def _fits(self, shape: tuple[int, ...]) -> bool: ...

    @abstractmethod
    def _quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]: ...

    @abstractmethod
    def _create_linear(
        self, shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype
    ) -> nn.Module: ...


class Int8Scheme(Scheme):
    """Symmetric, one scale per output channel."""

    name = "int8"

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """N * K integers and N scales."""
        return shape[0] * shape[1] + shape[0] * dtype.itemsize

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return True

    def _quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        scale = scale.to(dtype).clamp(min=torch.finfo(dtype).tiny)
        integers = (weight / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return {"integers": integers, "scale": scale}

    def _create_linear(
        self, shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype
    ) -> nn.Module:
        return Int8Linear(shape, bias, dtype)


class Int4Scheme(Scheme):
    """Asymmetric, a scale and a zero per output channel and group of 64 (or 32) inputs."""

    name = "int4"

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """N * K half bytes, and a scale and a zero for each group."""
        num_groups = shape[1] // (_group_size(shape[1]) or shape[1])
        return shape[0] * shape[1] // 2 + 2 * num_groups * shape[0] * dtype.itemsize

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return _group_size(shape[1]) is not None

    def _quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        num_outputs, num_inputs = weight.shape
        groups = weight.view(num_outputs, -1, _group_size(num_inputs) or num_inputs)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        scale = ((high - low) / 15).clamp(min=torch.finfo(dtype).tiny).to(dtype)
        zero = (low + 8 * scale.float()).to(dtype)  # what the integer 8 stands for
        integers = (groups - zero.float()[..., None]) / scale.float()[..., None]
        integers = integers.round_().add_(8).clamp_(0, 15).to(torch.uint8).view(weight.shape)
        pairs = integers[:, 0::2] | (integers[:, 1::2] << 4)
        return {"pairs": pairs, "scale_zero": torch.stack([scale.t(), zero.t()], 2).contiguous()}

    def _create_linear(
        self, shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype
    ) -> nn.Module:
        return Int4Linear(shape, bias, dtype)


SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (Int8Scheme(), Int4Scheme())}


def _group_size(num_inputs: int) -> int | None:
    return next((size for size in _GROUP_SIZES if num_inputs % size == 0), None)


class Int8Linear(nn.Module):
    """A linear over int8 weights. Shapes: integers (N, K), scale (N,)."""

    integers: Tensor
    scale: Tensor

    def __init__(self, shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("integers", torch.empty(shape, dtype=torch.int8, device="meta"))
        self.register_buffer("scale", torch.empty(shape[0], dtype=dtype, device="meta"))
        self.bias = nn.Parameter(bias) if bias is not None else None
        self._has_kernel = False

    def prepare(self) -> None:
        """Use torch's kernel if it is there and right."""
        self._has_kernel = self.integers.device.type == "cpu" and has_int8_kernel(self.scale.dtype)

    def dequantized(self) -> Tensor:
        """Shapes: returns (N, K)."""
        return self.integers.to(self.scale.dtype) * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (M, K); returns (M, N)."""
        if self._has_kernel and x.shape[0] <= _MAX_KERNEL_TOKENS:
            y = torch.ops.aten._weight_int8pack_mm(x, self.integers, self.scale)
        else:
            y = F.linear(x, self.integers.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


class Int4Linear(nn.Module):
    """A linear over pairs of int4 weights: (integer - 8) * scale + zero.

    Shapes: pairs (N, K / 2), inputs 2i and 2i + 1 in one byte; scale_zero (G, N, 2). Once prepared for
    torch's kernel, `pairs` is in its order: per block of outputs, per input, outputs n and n + block / 2.
    """

    pairs: Tensor
    scale_zero: Tensor

    def __init__(self, shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        num_outputs, num_inputs = shape
        self._group_size = _group_size(num_inputs) or num_inputs
        groups = (num_inputs // self._group_size, num_outputs, 2)
        pairs = torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8, device="meta")
        self.register_buffer("pairs", pairs)
        self.register_buffer("scale_zero", torch.empty(groups, dtype=dtype, device="meta"))
        self.bias = nn.Parameter(bias) if bias is not None else None
        self._block: int | None = (
            None  #: outputs that the kernel's order interleaves; None: plain order
        )

    def prepare(self) -> None:
        """Reorder the weights for torch's kernel if it is there and right."""
        if self.pairs.device.type != "cpu" or self._block is not None:
            return
        block = int4_kernel_block(self.scale_zero.dtype)
        if block is not None and self.pairs.shape[0] % block == 0:
            self.pairs = pack_int4(self._integers().to(torch.int32))
            self._block = block

    def dequantized(self) -> Tensor:
        """Shapes: returns (N, K)."""
        num_outputs = self.pairs.shape[0]
        scale, zero = self.scale_zero.unbind(2)
        groups = self._integers().t().reshape(-1, self._group_size, num_outputs)
        weight = (groups.to(scale.dtype) - 8) * scale[:, None] + zero[:, None]
        return weight.view(-1, num_outputs).t()

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (M, K); returns (M, N)."""
        if self._block is not None and x.shape[0] <= _MAX_KERNEL_TOKENS:
            kernel = torch.ops.aten._weight_int4pack_mm_for_cpu
            y = kernel(x.contiguous(), self.pairs, self._group_size, self.scale_zero)
        else:
            y = F.linear(x, self.dequantized())
        return y if self.bias is None else y + self.bias

    def _integers(self) -> Tensor:
        """Shapes: returns (N, K), values 0..15."""
        return (
            unpack_pairs(self.pairs)
            if self._block is None
            else unpack_int4(self.pairs, self._block)
        )


def unpack_pairs(pairs: Tensor) -> Tensor:
    """Shapes: (N, K / 2); returns (N, K)."""
    return torch.stack([pairs & 15, pairs >> 4], dim=2).view(pairs.shape[0], -1)


def pack_int4(integers: Tensor) -> Tensor:
    """The order of torch's CPU kernel. Shapes: int32 (N, K); returns uint8 (N, K / 2)."""
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers.contiguous(), 1)


def unpack_int4(packed: Tensor, block: int) -> Tensor:
    """What `pack_int4` made, back. Shapes: (N, K / 2); returns (N, K)."""
    num_outputs, half = packed.shape
    blocks = packed.view(num_outputs // block, half * 2, block // 2)
    both = torch.cat([blocks & 15, blocks >> 4], dim=2)
    return both.transpose(1, 2).reshape(num_outputs, half * 2)


@cache
def has_int8_kernel(dtype: torch.dtype) -> bool:
    """Whether torch has its int8 product on this machine, and it is right."""
    linear = Int8Linear((48, 64), None, dtype)
    weights = SCHEMES["int8"]._quantize(_sample(48, 64), dtype)
    linear.load_state_dict(weights, assign=True)
    x = _sample(3, 64).to(dtype)
    try:
        found = torch.ops.aten._weight_int8pack_mm(x, linear.integers, linear.scale)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return _is_close(found, x, linear.dequantized())


@cache
def int4_kernel_block(dtype: torch.dtype) -> int | None:
    """How torch's int4 kernel orders outputs on this machine; None where it is absent or wrong."""
    linear = Int4Linear((128, 128), None, dtype)
    linear.load_state_dict(SCHEMES["int4"]._quantize(_sample(128, 128), dtype), assign=True)
    weight, integers = linear.dequantized(), unpack_pairs(linear.pairs)
    x = _sample(3, 128).to(dtype)
    try:
        packed = pack_int4(integers.to(torch.int32))
        kernel = torch.ops.aten._weight_int4pack_mm_for_cpu
        found = kernel(x, packed, linear._group_size, linear.scale_zero)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None
    if not _is_close(found, x, weight):
        return None
    known = (block for block in _INT4_BLOCKS if torch.equal(unpack_int4(packed, block), integers))
    return next(known, None)


def _sample(rows: int, columns: int) -> Tensor:
    """Fixed numbers without touching the random state."""
    return torch.sin(torch.arange(rows * columns, dtype=torch.float32) * 0.7).view(rows, columns)


def _is_close(found: Tensor, x: Tensor, weight: Tensor) -> bool:
    expected = x.float() @ weight.float().t()
    tolerance = 4 * torch.finfo(x.dtype).eps * expected.abs().max() + 1e-5
    return bool(((found.float() - expected).abs() <= tolerance).all())
