"""The compressed-tensors format, which LLM Compressor writes.

Layout: `pack-quantized` has `weight_packed` (N, K bits / 32), `weight_shape` (2,), `weight_scale` (N, G) or (N, 1),
`weight_zero_point` (N bits / 32, G) if asymmetric, `weight_g_idx` (K,) if inputs are grouped by activation order.
The other formats have `weight` (N, K) of int8 or float8_e4m3fn, and the same scales, or one per tensor or per block.
Settings for activations and the KV cache are ignored: both stay unquantized.
Source: compressed-tensors 0.20.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.packages.checkpoint_json import Fields, shown
from engines.torch_backend.loading.formats.fp8 import FLOATS, check_block, scaled, scaled_layout
from engines.torch_backend.loading.formats.reader import (
    Integers,
    Layout,
    Reader,
    StoredLinear,
    input_order,
    unpack_words,
)
from engines.torch_backend.models.config import UnsupportedCheckpoint

_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
)
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Quantization of the weights of one group of layers."""

    kind: str
    bits: int
    strategy: str
    group_size: int
    block: tuple[int, int] | None
    is_symmetric: bool


class CompressedTensorsReader(Reader):
    marker = ("weight_packed", "weight_scale")
    part_names = frozenset(
        f"weight{part}" for part in ("", "_packed", "_scale", "_zero_point", "_shape", "_g_idx")
    )
    ignored = frozenset(
        {"input_scale", "input_zero_point", "output_scale", "output_zero_point"}
        | {f"{side}_{part}" for side in "qkv" for part in ("scale", "zero_point")}
    )

    def __init__(self, config: Fields) -> None:
        for name in ("sparsity_config", "transform_config"):
            section = config.section(name)
            if section.values and section.get("format") != "dense":
                what = shown(section.get("sparsity_structure", section.get("format")))
                raise config.refuse(name, f"is {what}; only dense weights are supported")
        config.one_of("format", _FORMATS)
        status = config.get("quantization_status", "compressed")
        if status not in ("compressed", "frozen"):
            raise config.refuse("quantization_status", f"is {shown(status)}, not 'compressed'")
        groups = config.section("config_groups")
        if not groups.values:
            raise config.refuse("config_groups", "is missing")
        self._schemes = [_read_scheme(groups.section(name)) for name in groups.values]
        kinds = sorted({f"{scheme.kind}{scheme.bits}" for scheme in self._schemes})
        self.name = f"compressed-tensors of {' and '.join(kinds)}"

    def layout(self, linear: StoredLinear) -> Layout:
        """The layout of a layer, from its headers and the first scheme that matches them."""
        return self._find(linear)[1]

    def read(self, linear: StoredLinear) -> Integers | Tensor:
        scheme, layout = self._find(linear)
        if not layout.bits:
            return scaled(linear, "weight_scale", scheme.block)
        num_outputs, num_inputs = layout.shape
        if "weight_packed" in linear.parts:
            if tuple(linear.read("weight_shape").tolist()) != layout.shape:
                raise linear.refuse("weight_shape", f"is not {layout.shape}")
            values = unpack_words(linear.read("weight_packed"), layout.bits)[:, :num_inputs]
            values = values.contiguous()
        else:
            values = linear.read("weight").view(torch.uint8) ^ 128
        order = input_order(linear, "weight_g_idx", layout)
        num_groups = -(-num_inputs // layout.group_size)
        scale = linear.read("weight_scale").float().reshape(-1, num_groups)
        zero = _zeros(linear, scheme, scale.shape[0])
        return Integers(
            values if order is None else values[:, order],
            layout.bits,
            layout.group_size,
            scale.expand(num_outputs, -1).t().contiguous(),
            None if zero is None else zero.expand(num_outputs, -1).t().contiguous(),
            order,
        )

    def _find(self, linear: StoredLinear) -> tuple[_Scheme, Layout]:
        """The first scheme that fits a layer, and its layout. Raises: the first scheme's UnsupportedCheckpoint."""
        refused: list[UnsupportedCheckpoint] = []
        for scheme in self._schemes:
            try:
                return scheme, _layout(linear, scheme)
            except UnsupportedCheckpoint as error:
                refused.append(error)
        raise refused[0]


def _read_scheme(group: Fields) -> _Scheme:
    weights = group.section("weights")
    if not weights.values:
        raise group.refuse("weights", "is missing; quantizing activations only is not supported")
    bits = weights.whole("num_bits", 8, at_most=16)
    kind = weights.one_of("type", ("int", "float"), "int")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise weights.refuse(
            "num_bits", f"is {bits} of type {kind}; int 4, int 8 and float 8 are supported"
        )
    group.one_of("format", _FORMATS)
    size = weights.whole("group_size", None, at_least=-1, at_most=2**20)
    usual = "group" if size and size > 0 else "channel" if size == -1 else "tensor"
    strategy = weights.one_of("strategy", _STRATEGIES, usual)
    if strategy == "group" and (size is None or size < 1):
        raise weights.refuse("group_size", f"is {size}; strategy 'group' requires at least 1")
    block = check_block(weights, "block_structure") if strategy == "block" else None
    if (strategy == "block") is not (block is not None):
        raise weights.refuse("block_structure", "is missing; strategy 'block' requires it")
    if (kind == "float" and strategy == "group") or (kind == "int" and strategy == "block"):
        raise weights.refuse("strategy", f"{strategy!r} is not supported for {kind} weights")
    symmetric = weights.flag("symmetric", True)
    if kind == "float" and not symmetric:
        raise weights.refuse("symmetric", "is false; float weights must not have zero points")
    return _Scheme(kind, bits, strategy, size or 0, block, symmetric)


def _layout(linear: StoredLinear, scheme: _Scheme) -> Layout:
    if scheme.kind == "float":
        return scaled_layout(linear, "weight_scale", scheme.block)
    if "weight_packed" in linear.parts:
        num_outputs, num_words = linear.expect_matrix("weight_packed", "I32")
        linear.expect("weight_shape", (2,), "I64", "I32")
        most = num_words * 32 // scheme.bits
        num_inputs = int(linear.read("weight_shape")[1])
        if not most - 32 // scheme.bits < num_inputs <= most:
            raise linear.refuse("weight_shape", f"has {num_inputs} inputs, but {most} are stored")
    else:
        num_outputs, num_inputs = linear.expect_matrix("weight", "I8")
    size = scheme.group_size if scheme.strategy == "group" else num_inputs
    num_groups = -(-num_inputs // size)
    shape = linear.expect("weight_scale", None, *FLOATS).shape
    known = [(num_outputs, num_groups)]
    if scheme.strategy != "group":
        known += [(num_outputs,), (1,), (), (1, 1)]
    if shape not in known:
        raise linear.refuse("weight_scale", f"has shape {shape}; other tensors require {known[0]}")
    if not scheme.is_symmetric and _has_packed_zeros(linear, scheme):
        num_words = -(-shape[0] * scheme.bits // 32)
        linear.expect("weight_zero_point", (num_words, shape[1]), "I32")
    elif not scheme.is_symmetric:
        linear.expect("weight_zero_point", shape, "I8")
    if "weight_g_idx" in linear.parts:
        linear.expect("weight_g_idx", (num_inputs,), "I32", "I64")
    return Layout((num_outputs, num_inputs), scheme.bits, size, scheme.is_symmetric)


def _has_packed_zeros(linear: StoredLinear, scheme: _Scheme) -> bool:
    return "weight_packed" in linear.parts and scheme.strategy != "tensor"


def _zeros(linear: StoredLinear, scheme: _Scheme, num_rows: int) -> Tensor | None:
    """Shapes: returns (num_rows, G)."""
    if "weight_zero_point" not in linear.parts:
        return None
    zeros, middle = linear.read("weight_zero_point"), 2 ** (scheme.bits - 1)
    if scheme.is_symmetric:
        if bool(zeros.any()):
            raise linear.refuse("weight_zero_point", "is not 0, but the weights are symmetric")
        return None
    if _has_packed_zeros(linear, scheme):
        return unpack_words(zeros.t(), scheme.bits).t()[:num_rows].float()
    zeros = zeros.float().reshape(num_rows, -1)
    if bool(((zeros < -middle) | (zeros >= middle)).any()):
        raise linear.refuse("weight_zero_point", f"is outside {-middle}..{middle - 1}")
    return zeros + middle
