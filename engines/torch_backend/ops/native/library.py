"""The compiled kernels as Python functions over tensors. ctypes releases the GIL during a call.

The callers decide when a kernel is used, and check its results.

Shape letters: M tokens, K inputs, N outputs, S sequences with one new token, H query heads, D head width.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ABI = 6  #: `VLM_ABI` of abi.h


class AbiMismatch(Exception):
    """A library was made of other structs than those of this module, and would read what is not there."""


class Kind(IntEnum):
    """Formats of weights; `Kind` of abi.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    INT4 = 4
    INT4_BFLOAT16_SCALES = 5


#: Bits of activations for bfloat16 weights: rounded, or not.
BFLOAT16_BITS, FLOAT_BITS = 16, 32

FLOAT_KINDS = {
    torch.float32: Kind.FLOAT32,
    torch.bfloat16: Kind.BFLOAT16,
    torch.float16: Kind.FLOAT16,
}


class Before(IntEnum):
    """The operation on a product's input; `Before` of abi.h."""

    NOTHING = 0
    RMS_NORM = 1
    SILU_GATE = 2
    QUICK_GELU = 3
    GELU = 4


class LinearStruct(ctypes.Structure):
    """`Linear` of abi.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class StepStruct(ctypes.Structure):
    """`Step` of abi.h."""

    _fields_ = (
        ("linears", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("before", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("gain", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("adds", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


class AttentionStruct(ctypes.Structure):
    """`Attention` of abi.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("num_tokens", ctypes.c_int64),
        ("num_sequences", ctypes.c_int64),
        ("num_decodes", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("table_width", ctypes.c_int64),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("row_offsets", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
    )


class HeadsStruct(ctypes.Structure):
    """`Heads` of abi.h."""

    _fields_ = (
        ("query_gain", ctypes.c_void_p),
        ("key_gain", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("rotates", ctypes.c_int32),
    )


class LayerStruct(ctypes.Structure):
    """`Layer` of abi.h."""

    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("heads", HeadsStruct),
    )


class LayersStruct(ctypes.Structure):
    """`Layers` of abi.h."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("attention", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("mixed", ctypes.c_void_p),
        ("gated", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
    )


class DenseAttentionStruct(ctypes.Structure):
    """`DenseAttention` of abi.h."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("num_sequences", ctypes.c_int64),
        ("query_offsets", ctypes.c_void_p),
        ("key_offsets", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        ("queries", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


_STRUCTS: tuple[type[ctypes.Structure], ...] = (
    LinearStruct,
    StepStruct,
    AttentionStruct,
    HeadsStruct,
    LayerStruct,
    LayersStruct,
    DenseAttentionStruct,
)


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one linear layer. Shapes: scale and bias (N,), float32."""

    kind: Kind
    num_outputs: int
    num_inputs: int
    data: Tensor
    group: int = 0
    scale: Tensor | None = None
    bias: Tensor | None = None


class NativeKernel:
    """The product of x with linear layers of one kind and width, concatenated."""

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
        """`gain` (K,), float32, and `eps`: of the norm; `bits`: see `Step` in abi.h."""
        self.num_inputs = weights[0].num_inputs * (2 if before is Before.SILU_GATE else 1)
        self.num_outputs = sum(part.num_outputs for part in weights)
        self.fuses_prologue = True
        self.max_tokens = 1 << 30  #: above, torch is faster
        self._library = library
        self._kept = (weights, gain)  # the kernel reads their memory
        self._linears = (LinearStruct * len(weights))(*map(_to_struct, weights))
        self._step = StepStruct(
            linears=ctypes.addressof(self._linears),
            count=len(weights),
            before=before,
            bits=bits,
            eps=eps,
            gain=_address(gain),
        )

    @property
    def address(self) -> int:
        """The address of the kernel's struct."""
        return ctypes.addressof(self._step)

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Shapes: x float32 (M, K), or (M, 2 K) for a gate; returns (M, N), `add_to` if it is given."""
        x = x.contiguous()
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
    """The functions of a compiled library. Raises: OSError if it cannot be loaded, AbiMismatch."""

    def __init__(self, file: Path) -> None:
        self.file = file
        functions = ctypes.CDLL(str(file))
        _check_abi(functions)
        functions.vlm_level.restype = ctypes.c_char_p
        self.level: str = functions.vlm_level().decode()  #: name of its level
        self.linear = _returning_nothing(functions.vlm_linear, ctypes.c_void_p)
        self.layers = _returning_nothing(functions.vlm_layers, ctypes.c_void_p)
        self.dense_attention = _returning_nothing(functions.vlm_dense_attention, ctypes.c_void_p)
        self.attention = _returning_nothing(
            functions.vlm_attention, *[ctypes.c_void_p] * 6, ctypes.c_int32
        )


def _returning_nothing(function: Any, *argument_types: Any) -> Any:
    function.argtypes, function.restype = argument_types, None
    return function


def _check_abi(functions: ctypes.CDLL) -> None:
    if (found := functions.vlm_abi()) != ABI:
        raise AbiMismatch(f"the library has interface {found}, library.py {ABI}")
    functions.vlm_sizeof.argtypes = [ctypes.c_char_p]
    functions.vlm_sizeof.restype = ctypes.c_int64
    for struct in _STRUCTS:
        name = struct.__name__.removesuffix("Struct")
        theirs, ours = functions.vlm_sizeof(name.encode()), ctypes.sizeof(struct)
        if theirs != ours:
            raise AbiMismatch(
                f"{name} has {theirs} bytes in abi.h, {struct.__name__} of library.py has {ours}: "
                "make their fields alike"
            )


def _to_struct(weights: Weights) -> LinearStruct:
    return LinearStruct(
        kind=weights.kind,
        group=weights.group,
        num_outputs=weights.num_outputs,
        num_inputs=weights.num_inputs,
        weights=_address(weights.data),
        scale=_address(weights.scale),
        bias=_address(weights.bias),
    )


def _address(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()
