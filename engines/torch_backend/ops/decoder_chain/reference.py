"""Shape letters: N tokens, C hidden width."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from engines.torch_backend.ops.linear.reference import LinearKernel
from engines.torch_backend.ops.paged_attention.reference import PLAIN, Attend, Heads


class LayerProducts(NamedTuple):
    """The products of a layer, with norms before the first and third and a gate before the last."""

    qkv: LinearKernel
    out: LinearKernel
    gate_up: LinearKernel
    down: LinearKernel
    heads: Heads = PLAIN

    @property
    def products(self) -> tuple[LinearKernel, LinearKernel, LinearKernel, LinearKernel]:
        return self[:4]


class Chain(Protocol):
    def can_run(self, x: Tensor, attend: Attend) -> bool: ...

    def __call__(self, x: Tensor, attend: Attend, num_layers: int) -> None:
        """Compute the first `num_layers` layers. Shapes: x float32 (N, C), changed in place."""
        ...


CreateChain = Callable[[Sequence[LayerProducts]], Chain | None]


class CallByCall:
    """The reference: one call for each product and attention of a layer."""

    def __init__(self, layers: Sequence[LayerProducts]) -> None:
        self._layers = layers

    def can_run(self, x: Tensor, attend: Attend) -> bool:
        return True

    def __call__(self, x: Tensor, attend: Attend, num_layers: int) -> None:
        """Shapes: x (N, C), changed in place."""
        for layer, products in enumerate(self._layers[:num_layers]):
            products.out(attend(layer, products.qkv(x), products.heads), add_to=x)
            products.down(products.gate_up(x), add_to=x)
