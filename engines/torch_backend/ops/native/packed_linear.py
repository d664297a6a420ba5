"""A linear over integer weights in the order of the C++ kernels, and how a loaded model gets them.

Shape letters: M tokens, K inputs, N outputs.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.layers.linear import LinearWeights, Precision
from engines.torch_backend.layers.quantization import SCHEMES
from engines.torch_backend.layers.quantized_linear import (
    Int4Linear,
    Int8Linear,
    QuantizedLinear,
    unpack_pairs,
)
from engines.torch_backend.ops.native.library import Kind, Weights
from engines.torch_backend.ops.native.packing import (
    INT8_GROUP,
    pack_int4,
    pack_int8,
    unpack_int4,
    unpack_int8,
)
from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.parallel.mesh import share_of


class PackedLinear(nn.Module):
    """Holds packed weights for the kernels; called itself, it computes the plain way."""

    op: str
    scale: Tensor | None
    blocks: Tensor

    def __init__(self, linear: QuantizedLinear) -> None:
        """Pack the weights of a linear, which may be dropped afterwards."""
        super().__init__()
        self.op = linear.op
        self.share_of_whole = share_of(linear)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.float(), False)
        if isinstance(linear, Int8Linear):
            self.kind, self.group_size = Kind.INT8, INT8_GROUP
            self.num_outputs, self.num_inputs = linear.integers.shape
            blocks, scale = pack_int8(linear.integers), linear.scale.float()
        else:
            assert isinstance(linear, Int4Linear)
            self.group_size = linear.group_size
            self.num_outputs, self.num_inputs = linear.pairs.shape[0], linear.pairs.shape[1] * 2
            scale_zero = _narrowed(linear.scale_zero)
            is_narrow = scale_zero.dtype == torch.bfloat16
            self.kind = Kind.INT4_BFLOAT16_SCALES if is_narrow else Kind.INT4
            blocks, scale = pack_int4(unpack_pairs(linear.pairs, self.group_size), scale_zero), None
        self.register_buffer("blocks", blocks)
        self.register_buffer("scale", scale)

    def to_weights(self) -> Weights:
        """As the kernels read them."""
        shape = (self.num_outputs, self.num_inputs)
        return Weights(self.kind, *shape, self.blocks, self.group_size, self.scale, self.bias)

    def dequantized(self) -> Tensor:
        """What the integers stand for. Shapes: returns float32 (N, K)."""
        if self.scale is not None:
            integers = unpack_int8(self.blocks, self.num_outputs, self.num_inputs)
            return integers * self.scale[:, None]
        dtype = torch.bfloat16 if self.kind is Kind.INT4_BFLOAT16_SCALES else torch.float32
        integers, scale_zero = unpack_int4(self.blocks, self.num_outputs, self.group_size, dtype)
        scale, zero = scale_zero.float().transpose(0, 1).unbind(2)
        return ((integers.float() - 8) * scale[..., None] + zero[..., None]).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        """The reference implementation of the kernel. Shapes: (M, K); returns (M, N)."""
        return F.linear(x.float(), self.dequantized(), self.bias).to(x.dtype)


def pack_linears(model: nn.Module, ops: Ops, dtype: torch.dtype) -> None:
    """Replace the quantized linears of a loaded model, one after another.

    Those without a right kernel become what torch computes with, in `Ops.product_dtype(dtype)`.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    for name in names:  # nothing here may keep what is replaced: it is as large as the model
        module = model.get_submodule(name)
        assert isinstance(module, QuantizedLinear)
        if ops.uses(module.op, "cpu"):
            model.set_submodule(name, PackedLinear(module))
        else:
            module.to(ops.product_dtype(dtype))
            module.prepare(ops.site.level)


def pack_int8_beside(model: nn.Module, ops: Ops) -> None:
    """Linears that may be in int8 beside a quantized decoder, one after another: what they were is dropped."""
    if not ops.uses("linear_int8", "cpu"):
        return
    names = [name for name, module in model.named_modules() if _may_be_int8(module)]
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(name, PackedLinear(_to_int8(linear)))


def _may_be_int8(module: nn.Module) -> bool:
    return isinstance(module, LinearWeights) and module.precision is Precision.INT8


def _to_int8(linear: nn.Linear) -> Int8Linear:
    quantized = Int8Linear((linear.out_features, linear.in_features), linear.bias, torch.float32)
    weight = linear.weight.detach()  # or the scales would keep all that they were computed of
    parts = SCHEMES["int8"].quantize(weight, torch.float32)
    quantized.load_state_dict(parts, assign=True, strict=False)
    return quantized


def _narrowed(scale_zero: Tensor) -> Tensor:
    """In bfloat16 where that loses nothing, else in float32."""
    narrow = scale_zero.bfloat16()
    return narrow if torch.equal(narrow.to(scale_zero.dtype), scale_zero) else scale_zero.float()
