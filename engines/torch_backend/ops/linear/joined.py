"""Linear layers with a common input as one matrix product, for GPUs, where a launch costs more than a copy.

The layers' weights become views of the joined weight, so that nothing is stored twice.

Shape letters: M rows, K inputs, N outputs of all layers together.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from engines.torch_backend.layers.linear import OUTPUT_DIMS, Linear, empty_linear, method_of
from engines.torch_backend.ops.linear.reference import UNLIMITED, Bind, LinearKernel, Prologue
from engines.torch_backend.ops.registry import Candidate

#: Up to this number of rows, a kernel reads the integer weights; for more rows they are dequantized.
MAX_KERNEL_ROWS = 64

#: Product of an input and a joined layer, without the bias. Shapes: (M, K); returns (M, N).
Multiply = Callable[[Tensor, nn.Module], Tensor]


class JoinedKernel:
    """The product of several layers, concatenated."""

    max_tokens = UNLIMITED
    fuses_prologue = adds = False

    def __init__(self, layer: nn.Module, kernel: Multiply | None) -> None:
        """`kernel`: used for up to `MAX_KERNEL_ROWS` rows; None: torch computes all products."""
        self._layer = layer
        self._method = method_of(layer)
        self._kernel = kernel

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Shapes: (M, K); returns (M, N)."""
        assert add_to is None
        layer = self._layer
        if self._kernel is None or x.shape[0] > MAX_KERNEL_ROWS:
            return self._method.apply(layer, x)
        y, bias = self._kernel(x, layer), layer.bias
        return y + bias if isinstance(bias, Tensor) else y


def bind_joined(kernel: Multiply | None = None) -> Bind:
    """Bind layers of one method. Layers with a common input have equal numbers of inputs, so equal group sizes."""

    def bind(
        layers: Sequence[nn.Module], prologue: Prologue, dtype: torch.dtype
    ) -> LinearKernel | None:
        if len({method_of(layer) for layer in layers}) > 1:
            return None
        return JoinedKernel(layers[0] if len(layers) == 1 else join(layers), kernel)

    return bind


_WHY = "weights are joined on GPUs only: on CPUs they stay in the mapped file"
JOINED = Candidate("joined", lambda site: bind_joined(), lambda site: "" if site.joins else _WHY)


def join(layers: Sequence[nn.Module]) -> Linear:
    """A layer with the outputs of all layers, whose weights become views of its weight."""
    first, num_outputs = layers[0], sum(int(layer.out_features) for layer in layers)  # pyright: ignore
    joined, whole = empty_linear(first.in_features, num_outputs), {}  # pyright: ignore
    for name in [name for name, x in (*first.named_parameters(), *first.named_buffers())]:
        if name in ("bias", "order"):
            continue
        dim = OUTPUT_DIMS[name]
        tensors = [getattr(layer, name).detach() for layer in layers]
        whole[name] = torch.cat(tensors, dim=dim)
        views = whole[name].split([tensor.shape[dim] for tensor in tensors], dim=dim)
        for layer, view in zip(layers, views, strict=True):
            is_parameter = name in layer._parameters
            setattr(layer, name, nn.Parameter(view, False) if is_parameter else view)
    biases = [layer.bias.detach() for layer in layers if isinstance(layer.bias, Tensor)]
    if biases:
        whole["bias"] = torch.cat(biases)
    joined.hold(method_of(first), whole, getattr(first, "group_size", 0))
    return joined
