"""Linears that read the same input, computed as one product; weights of few bits by kernels where rows are few.

Used by `cuda_decoder`. The model's own linears become views of the joined weights: nothing is held twice.

Shape letters: M rows, K inputs, N outputs of all parts together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engines.torch_backend.layers.quantized_linear import Int4Linear, Int8Linear
from engines.torch_backend.ops.decoder_ops import DecoderOps

#: Rows up to which weights of few bits go to a kernel; for more they are made into a matrix first.
MAX_KERNEL_ROWS = 64

#: Tensors of each kind of linear, and which dimension is that of the outputs.
_WEIGHTS: dict[type[nn.Module], dict[str, int]] = {
    nn.Linear: {"weight": 0},
    Int8Linear: {"integers": 0, "scale": 0},
    Int4Linear: {"pairs": 0, "scale_zero": 1},
}


class JoinedLinear:
    """One product that has the outputs of several linears, side by side."""

    def __init__(self, parts: Sequence[nn.Module], ops: DecoderOps) -> None:
        """The parts are of one kind: whether a weight is quantized depends on its inputs' number alone."""
        self._ops = ops
        self._linear = _join(parts) if len(parts) > 1 else parts[0]

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: (M, K); returns (M, N)."""
        linear = self._linear
        if x.shape[0] > MAX_KERNEL_ROWS:
            return linear(x)
        if isinstance(linear, Int8Linear):
            return _add(self._ops.multiply_int8(x, linear.integers, linear.scale), linear.bias)
        if isinstance(linear, Int4Linear):
            return _add(self._ops.multiply_int4(x, linear.pairs, linear.scale_zero), linear.bias)
        return linear(x)


def _add(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias


def _join(parts: Sequence[nn.Module]) -> nn.Module:
    """A linear with the outputs of all parts, whose weights become views of its own."""
    joined = _create_like(parts)
    for name, dim in _WEIGHTS[type(joined)].items():
        tensors = [getattr(part, name).detach() for part in parts]
        whole = torch.cat(tensors, dim=dim)
        views = whole.split([tensor.shape[dim] for tensor in tensors], dim=dim)
        for module, tensor in zip((joined, *parts), (whole, *views), strict=True):
            is_parameter = name in module._parameters
            setattr(module, name, nn.Parameter(tensor, False) if is_parameter else tensor)
    return joined


def _create_like(parts: Sequence[nn.Module]) -> nn.Module:
    """A linear of the parts' kind and biases, with undefined weights."""
    first = parts[0]
    biases = [part.bias.detach() for part in parts if isinstance(part.bias, Tensor)]
    bias = torch.cat(biases) if biases else None
    if isinstance(first, Int8Linear):
        return Int8Linear((0, first.integers.shape[1]), bias, first.scale.dtype)
    if isinstance(first, Int4Linear):
        return Int4Linear((0, 2 * first.pairs.shape[1]), bias, first.scale_zero.dtype)
    assert isinstance(first, nn.Linear)
    joined = nn.Linear(first.in_features, 1, bias=False, device="meta")
    if bias is not None:
        joined.bias = nn.Parameter(bias, False)
    return joined
