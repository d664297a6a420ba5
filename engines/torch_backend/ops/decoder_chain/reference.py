"""Shape letters: N tokens, C hidden width."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engines.torch_backend.ops.linear.reference import LinearKernel
from engines.torch_backend.ops.paged_attention.reference import PLAIN, Attend, Heads


class LayerProducts(NamedTuple):
    """Of a layer, each with all that comes before it: norms are part of the first and the third, a gate of the last."""

    qkv: LinearKernel
    out: LinearKernel
    gate_up: LinearKernel
    down: LinearKernel
    heads: Heads = PLAIN

    @property
    def products(self) -> tuple[LinearKernel, LinearKernel, LinearKernel, LinearKernel]:
        return self[:4]


class Chain(Protocol):
    """Layers one after another."""

    def can_run(self, x: Tensor, attend: Attend) -> bool:
        """Whether it computes such a step."""
        ...

    def __call__(self, x: Tensor, attend: Attend) -> None:
        """Shapes: x float32 (N, C), replaced by what it becomes."""
        ...


CreateChain = Callable[[Sequence[LayerProducts]], Chain | None]


class CallByCall:
    """A call for each part."""

    def __init__(self, layers: Sequence[LayerProducts]) -> None:
        self._layers = layers

    def can_run(self, x: Tensor, attend: Attend) -> bool:
        return True

    def __call__(self, x: Tensor, attend: Attend) -> None:
        """Shapes: x (N, C), replaced by what it becomes."""
        for layer, products in enumerate(self._layers):
            products.out(attend(layer, products.qkv(x), products.heads), add_to=x)
            products.down(products.gate_up(x), add_to=x)
