"""The compiled kernels as Python functions over tensors. ctypes releases the GIL during a call.

The `cpu.py` files of operators call these functions. `choose` of ops/registry.py tests the operators at startup.

Shape letters: M tokens, K inputs, N outputs, S sequences with one new token, H query heads, D head width.
"""

import ctypes
import re
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engines.torch_backend.ops.native.packing import TILE


class Kind(IntEnum):
    """Formats of weights, as `Kind` of abi.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    INT4 = 4
    INT4_BFLOAT16_SCALES = 5


#: Bits of activations for float weights: 16 if they are rounded to bfloat16, otherwise 32.
BFLOAT16_BITS, FLOAT_BITS = 16, 32

FLOAT_KINDS = {
    torch.float32: Kind.FLOAT32,
    torch.bfloat16: Kind.BFLOAT16,
    torch.float16: Kind.FLOAT16,
}


class Before(IntEnum):
    """The operation that is fused before a matrix product, as `Before` of abi.h."""

    NOTHING = 0
    RMS_NORM = 1
    SILU_GATE = 2
    QUICK_GELU = 3
    GELU = 4


_TYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
_STRUCT = re.compile(r"struct (\w+) \{(.*?)\n\};", re.DOTALL)
_FIELDS = re.compile(r"(?:const )?(\w+)([^;]*);")


def _read_structs(header: Path) -> dict[str, type[ctypes.Structure]]:
    """The structs of a C++ header, by name. All pointers are `c_void_p`."""
    structs: dict[str, type[ctypes.Structure]] = {}
    for name, body in _STRUCT.findall(re.sub("//.*", "", header.read_text(encoding="utf-8"))):
        fields = [
            (
                field.strip(" *"),
                ctypes.c_void_p if "*" in field else _TYPES.get(kind, structs.get(kind)),
            )
            for kind, names in _FIELDS.findall(body)
            for field in names.split(",")
        ]
        structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs


STRUCTS = _read_structs(Path(__file__).with_name("abi.h"))


class Weights(NamedTuple):
    """The weights of one linear layer: the fields of `Linear` of abi.h. Shapes: scale and bias (N,), float32."""

    kind: Kind
    group: int
    num_outputs: int
    num_inputs: int
    data: Tensor
    scale: Tensor | None
    bias: Tensor | None


class NativeKernel:
    """Multiplies x by linear layers of one kind and width; the outputs are concatenated."""

    adds = True

    def __init__(
        self,
        library: "Library",
        weights: Sequence[Weights],
        bits: int = 8,
        before: Before = Before.NOTHING,
        gain: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """`gain` (K,), float32, and `eps`: parameters of the norm; `bits`: see `Step` in abi.h."""
        self.num_inputs = weights[0].num_inputs * (2 if before is Before.SILU_GATE else 1)
        self.num_outputs = sum(part.num_outputs for part in weights)
        self.fuses_prologue = True
        self.max_tokens = 1 << 30  #: no limit; ops/linear/cpu.py lowers it where torch is faster
        self._library = library
        self._kept = (weights, gain)  # the kernel reads their memory
        structs = (to_struct(part) for part in weights)
        self._linears = (STRUCTS["Linear"] * len(weights))(*structs)
        self._step = STRUCTS["Step"](
            linears=ctypes.addressof(self._linears),
            count=len(weights),
            before=before,
            bits=bits,
            eps=eps,
            gain=_address(gain),
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._step)

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Shapes: x float32 (M, K), or (M, 2 K) for a gate; returns (M, N), `add_to` if it is given."""
        x = x.contiguous()
        assert x.dtype is torch.float32
        y = add_to
        if y is None:
            y = torch.empty(x.shape[0], self.num_outputs)
        step = self._step
        step.num_tokens, step.x, step.y = x.shape[0], x.data_ptr(), y.data_ptr()
        step.adds = add_to is not None
        step.num_threads = torch.get_num_threads()
        self._library.linear(ctypes.byref(step))
        return y


class Library:
    """The functions of a compiled library. Raises: OSError if it cannot be loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file
        functions = ctypes.CDLL(str(file))
        self.linear = _returning_nothing(functions.vlm_linear, ctypes.c_void_p)
        self.dequantize = _returning_nothing(
            functions.vlm_dequantize, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32
        )
        self.layers = _returning_nothing(functions.vlm_layers, ctypes.c_void_p)
        self.dense_attention = _returning_nothing(functions.vlm_dense_attention, ctypes.c_void_p)
        self.attention = _returning_nothing(
            functions.vlm_attention, *[ctypes.c_void_p] * 6, ctypes.c_int32
        )


def dequantize(library: Library, weights: Weights) -> Tensor:
    """Integer weights as bfloat16. Shapes: returns (N, K)."""
    num_rows, num_groups = len(weights.data) * TILE, weights.data.shape[1]
    out = torch.empty(num_rows, num_groups * weights.group, dtype=torch.bfloat16)
    struct = to_struct(weights)
    library.dequantize(ctypes.byref(struct), out.data_ptr(), torch.get_num_threads())
    return out[: weights.num_outputs, : weights.num_inputs]


def to_struct(weights: Weights) -> ctypes.Structure:
    return STRUCTS["Linear"](*weights[:4], *map(_address, weights[4:]))


def _returning_nothing(function: Any, *argument_types: Any) -> Any:
    function.argtypes, function.restype = argument_types, None
    return function


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
