"""Linears that read the same input, computed as one product: how a GPU does it, whose launches cost more than a copy.

The parts become views of the joined weights: nothing is held twice.

Shape letters: M rows, K inputs, N outputs of all parts together.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from engines.torch_backend.layers.quantized_linear import Int4Linear, Int8Linear
from engines.torch_backend.ops.products import UNLIMITED, Before, Bind, Product
from engines.torch_backend.ops.registry import Candidate, Site

#: Rows up to which weights of few bits go to a kernel; for more they are made into a matrix first.
MAX_KERNEL_ROWS = 64

#: Tensors of each kind of linear, and which dimension is that of the outputs.
_WEIGHTS: dict[type[nn.Module], dict[str, int]] = {
    nn.Linear: {"weight": 0},
    Int8Linear: {"integers": 0, "scale": 0},
    Int4Linear: {"pairs": 0, "scale_zero": 1},
}

#: (x (M, K), a joined linear) to (M, N) without its bias.
Multiply = Callable[[Tensor, nn.Module], Tensor]


class JoinedProduct:
    """One product that has the outputs of several linears, side by side."""

    max_tokens = UNLIMITED
    takes_before = adds = False

    def __init__(self, linear: nn.Module, kernel: Multiply | None) -> None:
        """`kernel` computes few rows."""
        self._linear = linear
        self._kernel = kernel

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Shapes: (M, K); returns (M, N)."""
        assert add_to is None
        linear = self._linear
        if self._kernel is None or x.shape[0] > MAX_KERNEL_ROWS:
            return linear(x)
        y, bias = self._kernel(x, linear), linear.bias
        return y + bias if isinstance(bias, Tensor) else y


def bind_joined(kernel: Multiply | None = None) -> Bind:
    """Binds parts of one kind: whether a weight is quantized depends on its inputs' number alone."""

    def bind(parts: Sequence[nn.Module], before: Before, dtype: torch.dtype) -> Product | None:
        if len({type(part) for part in parts}) > 1 or not isinstance(parts[0], tuple(_WEIGHTS)):
            return None
        return JoinedProduct(_join(parts) if len(parts) > 1 else parts[0], kernel)

    return bind


def _lacks(site: Site) -> str:
    return (
        ""
        if site.joins
        else "weights are joined on GPUs: on CPUs they stay where their file is mapped"
    )


JOINED = Candidate("joined", build=lambda site: bind_joined(), lacks=_lacks)


def _join(parts: Sequence[nn.Module]) -> nn.Module:
    """A linear with the outputs of all parts, whose weights become views of its own."""
    joined = _create_like(parts)
    kind = next(kind for kind in _WEIGHTS if isinstance(joined, kind))
    for name, dim in _WEIGHTS[kind].items():
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
        shape = (0, 2 * first.pairs.shape[1])
        return Int4Linear(shape, bias, first.scale_zero.dtype, first.group_size)
    assert isinstance(first, nn.Linear)
    joined = nn.Linear(first.in_features, 1, bias=False, device="meta")
    if bias is not None:
        joined.bias = nn.Parameter(bias, False)
    return joined
