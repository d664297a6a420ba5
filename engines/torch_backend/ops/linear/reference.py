"""Products of one input with several linear layers, concatenated, in plain torch.

Linear operators are functions `bind(layers, prologue, dtype)` that return a `LinearKernel`, or None for layers that
they do not support. `bind` can change the layout of the weights.

Shape letters: M tokens, K inputs, N outputs of all layers together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from engines.torch_backend.layers.linear import apply
from engines.torch_backend.layers.norm import RMSNorm

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Prologue:
    """The operation on an input before the matrix product. At most one field is set."""

    norm: RMSNorm | None = None
    gate: Callable[[Tensor], Tensor] | None = None  #: the input is (g, u), the result gate(g) * u
    activation: Callable[[Tensor], Tensor] | None = None

    def __bool__(self) -> bool:
        return (self.norm or self.gate or self.activation) is not None

    def __call__(self, x: Tensor) -> Tensor:
        """Shapes: (M, K), or (M, 2 K) for a gate; returns (M, K)."""
        if self.norm is not None:
            return self.norm(x)
        if self.gate is not None:
            left, right = x.chunk(2, dim=1)
            return self.gate(left) * right
        return x if self.activation is None else self.activation(x)


class LinearKernel(Protocol):
    """Linear layers bound to an operator. `LinearGroup` computes the operations that the kernel does not fuse."""

    max_tokens: int  #: for more tokens the reference is faster
    fuses_prologue: bool
    adds: bool  #: whether it can add the product to a float32 tensor in place

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Shapes: (M, K); returns (M, N), in `add_to` if it is given."""
        ...


Bind = Callable[[Sequence[nn.Module], Prologue, torch.dtype], LinearKernel | None]


@dataclass(eq=False)
class ReferenceKernel:
    """Runs the reference arithmetic of each layer, with inputs in one dtype, whatever the dtype of the weights."""

    _layers: Sequence[nn.Module]
    _dtype: torch.dtype | None = None  #: None: the dtype of the input
    max_tokens = UNLIMITED
    fuses_prologue = adds = False

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Shapes: (M, K); returns (M, N), of the kernel's dtype."""
        assert add_to is None
        inputs = x.to(self._dtype or x.dtype)
        outputs = [apply(layer, inputs) for layer in self._layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def bind(layers: Sequence[nn.Module], prologue: Prologue, dtype: torch.dtype) -> LinearKernel:
    return ReferenceKernel(layers, dtype)
