"""Linear layers computed by C++ kernels, with packed weights, fused with the operations before and after the layer.

Shape letters: M tokens, K inputs, N outputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.layers.activation import quick_gelu
from engines.torch_backend.layers.linear import (
    FLOAT,
    INT4,
    INT8,
    Linear,
    LinearMethod,
    method_of,
    quantized_layers,
    unpack_pairs,
)
from engines.torch_backend.ops import native
from engines.torch_backend.ops.cpu_level import choose_level
from engines.torch_backend.ops.linear.reference import UNLIMITED, Bind, LinearKernel, Prologue
from engines.torch_backend.ops.native.library import (
    BFLOAT16_BITS,
    FLOAT_BITS,
    FLOAT_KINDS,
    Before,
    Kind,
    NativeKernel,
    Weights,
    dequantize,
)
from engines.torch_backend.ops.native.packing import (
    INT8_GROUP,
    pack_int4,
    pack_int8,
    unpack_int4,
    unpack_int8,
)
from engines.torch_backend.ops.registry import Ops, Site


class PackedMethod(LinearMethod):
    """Integer weights in the layout of the C++ kernels: `blocks`, and for int8 a `scale`."""

    def __init__(self, op: str, kind: Kind) -> None:
        self.op, self.kind = op, kind

    def dequantize(self, layer: Linear) -> Tensor:
        """Shapes: returns float32 (N, K)."""
        if self.kind is Kind.INT8:
            integers = unpack_int8(layer.blocks, layer.out_features, layer.in_features)
            return integers * layer.scale[:, None]
        dtype = torch.bfloat16 if self.kind is Kind.INT4_BFLOAT16_SCALES else torch.float32
        integers, scale_zero = unpack_int4(
            layer.blocks, layer.out_features, layer.group_size, dtype
        )
        scale, zero = scale_zero.float().transpose(0, 1).unbind(2)
        return ((integers.float() - 8) * scale[..., None] + zero[..., None]).flatten(1)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """Shapes: (M, K); returns (M, N)."""
        if x.dtype is torch.bfloat16 and (weights := to_weights(layer)) is not None:
            weight = dequantize(native.load(choose_level()), weights)
            return F.linear(x, weight, None if layer.bias is None else layer.bias.to(x.dtype))
        return F.linear(x.float(), self.dequantize(layer), layer.bias).to(x.dtype)


PACKED_INT8 = PackedMethod("linear_int8", Kind.INT8)
PACKED_INT4 = PackedMethod("linear_int4", Kind.INT4)
PACKED_INT4_BFLOAT16_SCALES = PackedMethod("linear_int4", Kind.INT4_BFLOAT16_SCALES)


def pack(layer: Linear) -> None:
    tensors = {} if layer.bias is None else {"bias": layer.bias.detach().float()}
    if layer.method is INT8:
        tensors |= {"blocks": pack_int8(layer.integers), "scale": layer.scale.float()}
        layer.hold(PACKED_INT8, tensors, INT8_GROUP)
        return
    scale_zero = narrow = layer.scale_zero.bfloat16()
    is_narrow = torch.equal(narrow.to(layer.scale_zero.dtype), layer.scale_zero)
    if not is_narrow:
        scale_zero = layer.scale_zero.float()
    size = layer.group_size
    tensors["blocks"] = pack_int4(unpack_pairs(layer.pairs, size), scale_zero)
    layer.hold(PACKED_INT4_BFLOAT16_SCALES if is_narrow else PACKED_INT4, tensors, size)


def pack_linears(model: nn.Module, ops: Ops, dtype: torch.dtype) -> None:
    """Pack the quantized layers. Layers without a usable kernel run in torch, in `Ops.product_dtype(dtype)`."""
    for layer, method in quantized_layers(model):
        if ops.uses(method.op, "cpu"):
            pack(layer)
        else:
            layer.to(ops.product_dtype(dtype))


def pack_int8_beside(model: nn.Module, ops: Ops) -> None:
    """Quantize the layers whose `quantizable` is "int8": those of towers and projectors, and the head."""
    if not ops.uses("linear_int8", "cpu"):
        return
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.quantizable == "int8" and layer.method is FLOAT:
            layer.quantize(INT8, torch.float32)
            pack(layer)


def build(site: Site) -> Bind:
    """The C++ kernel, for layers that it supports."""
    library = native.load(site.level)

    def bind(
        layers: Sequence[nn.Module], prologue: Prologue, dtype: torch.dtype
    ) -> LinearKernel | None:
        weights = [to_weights(layer) for layer in layers]
        usable = [each for each in weights if each is not None]
        if len(usable) < len(layers) or len({each.kind for each in usable}) > 1:
            return None
        before, gain, eps = Before.NOTHING, None, 0.0
        if prologue.norm is not None:
            before, gain = Before.RMS_NORM, prologue.norm.weight.float()
            eps = prologue.norm.eps
        elif prologue.gate is F.silu:
            before = Before.SILU_GATE
        elif prologue.activation is quick_gelu:
            before = Before.QUICK_GELU
        elif prologue.activation is F.gelu:
            before = Before.GELU
        bits, max_tokens = _limits(site, usable[0].kind, dtype)
        kernel = NativeKernel(library, usable, bits, before, gain, eps)
        kernel.fuses_prologue = before is not Before.NOTHING or not prologue
        kernel.max_tokens = max_tokens
        return kernel

    return bind


def _limits(site: Site, weights: Kind, dtype: torch.dtype) -> tuple[int, int]:
    """Bits of activations, and the number of tokens up to which the kernel is faster than torch."""
    if weights not in FLOAT_KINDS.values():
        is_rounded = dtype is torch.bfloat16 and site.bits == 8
        return site.bits, site.level.max_integer_tokens if is_rounded else UNLIMITED
    is_rounded = weights is Kind.BFLOAT16 and dtype is torch.bfloat16
    if is_rounded and site.level.max_rounded_tokens:
        return BFLOAT16_BITS, site.level.max_rounded_tokens
    return FLOAT_BITS, site.level.max_float_tokens


def to_weights(layer: nn.Module) -> Weights | None:
    """The weights of a layer for a kernel; None if no kernel supports them."""
    method = method_of(layer)
    if isinstance(layer, Linear) and method in (INT8, INT4):
        pack(layer)
        method = layer.method
    if isinstance(layer, Linear) and isinstance(method, PackedMethod):
        shape = layer.out_features, layer.in_features
        scale = layer.scale if method is PACKED_INT8 else None
        return Weights(method.kind, layer.group_size, *shape, layer.blocks, scale, layer.bias)
    weight, bias = layer.weight, layer.bias
    if not isinstance(weight, Tensor) or weight.dtype not in FLOAT_KINDS:
        return None
    bias = bias.float() if isinstance(bias, Tensor) else None
    num_outputs, num_inputs = weight.shape
    kind = FLOAT_KINDS[weight.dtype]
    return Weights(kind, 0, num_outputs, num_inputs, weight.contiguous(), None, bias)
