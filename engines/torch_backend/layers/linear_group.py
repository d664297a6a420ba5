"""Linear layers with a common input, computed as one matrix product with the operations before and after it.

A group runs plain torch until `bind` selects the operators of a device.

Shape letters: M tokens, K inputs, N outputs of all layers together.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from engines.torch_backend.layers.linear import Linear, empty_linear, method_of
from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.ops.add_norm.reference import AddNorm, add_norm
from engines.torch_backend.ops.linear.reference import LinearKernel, Prologue, ReferenceKernel
from engines.torch_backend.ops.registry import Ops

#: Function of a product and its inputs that adds to the product in place. Shapes: (M, N), (M, K).
Delta = Callable[[Tensor, Tensor], None]


class VocabEmbedding(nn.Embedding):
    """Token embeddings. A tied head uses their weight."""

    bias = None


@dataclass(eq=False)
class Stream:
    """The residual stream. The output of a layer is stored until the next norm, which can add it in the same pass."""

    _x: Tensor  #: (M, C)
    is_own: bool = False  #: whether `_x` has no other reader and can be changed in place
    _delta: Tensor | None = None

    def add(self, delta: Tensor) -> None:
        """Shapes: (M, C)."""
        self._x, self._delta = self.tensor(), delta

    def keep(self, rows: Tensor) -> None:
        self._x, self.is_own = self.tensor()[rows], True

    def tensor(self) -> Tensor:
        """Shapes: (M, C)."""
        if self._delta is not None:
            self._x = self._x.add_(self._delta) if self.is_own else self._x + self._delta
            self._delta = None
        return self._x

    def normed(self, norm: RMSNorm, add_norm: AddNorm) -> Tensor:
        """Shapes: (M, C)."""
        self._x, y = add_norm(self._x, self._delta, norm.weight, norm.eps)
        self._delta = None
        return y


class LinearGroup:
    def __init__(
        self, *layers: nn.Module, before: Prologue = Prologue(), after: RMSNorm | None = None
    ) -> None:
        """`layers` are `Linear`, layers of transformers, or the embeddings that a head is tied to."""
        self.layers = layers
        self._before, self._after = before, after
        self._ops: Ops | None = None
        self._dtype: torch.dtype | None = None
        self._order: Tensor | None = None  #: permutation of the kernel's inputs
        self._reference: LinearKernel = ReferenceKernel(layers)
        self.delta: Delta | None = None  #: added to every product
        self.kernel: LinearKernel = self._reference

    @property
    def is_whole(self) -> bool:
        """Whether `kernel` computes the complete result of a call."""
        is_alone = self._after is None and self._order is None
        return is_alone and (self.kernel.fuses_prologue or not self._before)

    def computes(self, num_tokens: int) -> bool:
        """Whether the kernel, not torch, computes a call with this number of tokens."""
        return num_tokens <= self.kernel.max_tokens

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        self._ops = ops
        self._dtype = torch.float32 if ops.is_native else dtype  # dtype of the kernels' inputs
        dtype = ops.product_dtype(dtype)
        self._reference = ReferenceKernel(self.layers, dtype)
        self.kernel = self._bind_kernel(ops, dtype) or self._reference

    def __call__(self, x: Tensor | Stream, add_to: Stream | None = None) -> Tensor:
        """Shapes: x (M, K), or (M, 2 K) for a gate; returns (M, N), added to `add_to` if it is given."""
        num_tokens = (x.tensor() if isinstance(x, Stream) else x).shape[0]
        kernel = self.kernel if self.computes(num_tokens) else self._reference
        inputs = self._prepare(x, kernel)
        is_ordered = self._order is None or kernel is self._reference
        given = inputs if is_ordered else inputs[:, self._order]
        if kernel is not self._reference:  # the reference uses the engine's precision
            given = given.to(self._dtype or given.dtype)
        is_alone = kernel.adds and self._after is None
        target = add_to.tensor() if add_to is not None and is_alone else None
        y = kernel(given, target)
        if self.delta is not None:
            self.delta(y, self._before(inputs) if kernel.fuses_prologue else inputs)
        if target is not None:
            return y
        if self._after is not None:
            y = self._after(y.to(inputs.dtype))
        if add_to is not None:
            add_to.add(y)
        return y

    def forward(self, x: Tensor) -> Tensor:
        """Call the group with any leading dimensions; the result has x's dtype. Shapes: (..., K); returns (..., N)."""
        # the function mode of multimodal/parts.py can split this call, but not the operations inside our kernels
        if has_torch_function((x,)):
            return handle_torch_function(self._forward, (x,), x)
        return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.computes(len(rows)):
            rows = rows.to(self._dtype or x.dtype)
        return self(rows).to(x.dtype).unflatten(0, x.shape[:-1])

    def _bind_kernel(self, ops: Ops, dtype: torch.dtype) -> LinearKernel | None:
        """Bind the operator's kernel; None if it cannot run all layers. Inputs are permuted before a norm or gate."""
        self._order = None
        kinds = {(method_of(each).op, getattr(each, "group_size", 0)) for each in self.layers}
        if len(kinds) > 1:
            return None
        orders = [getattr(each, "order", None) for each in self.layers]
        order, before = orders[0], self._before
        if any((each is None) != (order is None) for each in orders):
            return None
        if order is not None:
            if not all(torch.equal(order, each) for each in orders if each is not None):
                return None
            if before.norm is not None:
                gain = before.norm.weight
                norm = RMSNorm(len(order), before.norm.eps).to(gain.device, gain.dtype)
                norm.weight = nn.Parameter(gain[order], False)
                before = replace(before, norm=norm)
        [(op, _)] = kinds
        kernel: LinearKernel | None = ops[op](self.layers, before, dtype)
        if kernel is None or isinstance(kernel, ReferenceKernel):  # which permutes inputs itself
            return None
        if order is not None:
            is_gated = kernel.fuses_prologue and before.gate is not None
            self._order = torch.cat([order, order + len(order)]) if is_gated else order
        return kernel

    def _prepare(self, x: Tensor | Stream, kernel: LinearKernel) -> Tensor:
        before = self._before
        if isinstance(x, Stream):
            if before.norm is None or kernel.fuses_prologue:
                return x.tensor()
            return x.normed(before.norm, self._ops["add_norm"] if self._ops else add_norm)
        if not before or kernel.fuses_prologue:
            return x
        if before.gate is F.silu and self._ops is not None:
            return self._ops["gate"](x)
        return before(x)


def adopt(model: nn.Module, name: str) -> Linear:
    """Replace a linear layer of transformers by a `Linear` with its weight."""
    found = model.get_submodule(name)
    if type(found) is Linear:
        return found
    assert isinstance(found, nn.Linear)
    layer = empty_linear(found.in_features, found.out_features, bias=found.bias is not None)
    for part, parameter in found.named_parameters():
        layer.register_parameter(part, parameter)
    layer.group = LinearGroup(layer)
    model.set_submodule(name, layer)
    return layer
