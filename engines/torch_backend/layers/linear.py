"""Linear maps: how their weights are kept, which kernel computes them and what each device has of them.

A model declares `LinearWeights` under its checkpoint's names, and calls them through `Linear`: maps of one input side
by side, with what comes before and after. Unbound, a `Linear` computes in plain torch; `bind` gives it the operators
of a device.

Shape letters: M tokens, K inputs, N outputs.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.ops.add_norm.reference import AddNorm, add_norm
from engines.torch_backend.ops.products import Before, PlainProduct, Product
from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.parallel.mesh import SINGLE, WHOLE, Mesh, Share


class Precision(Enum):
    """In how many bits weights may be kept."""

    FULL = auto()  #: as they are stored
    SCHEME = auto()  #: as the model's quantization says
    INT8 = auto()  #: in int8 where a kernel reads it, if the model is quantized at all


class LinearWeights(nn.Linear):
    """One map's weights, or a member's share of them. Quantized ones take its place in the model."""

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        bias: bool = True,
        precision: Precision = Precision.FULL,
        share: Share = WHOLE,
    ) -> None:
        """`num_inputs` and `num_outputs` are of all members together. Raises: ValueError if they do not divide."""
        size = share.count
        shared = {"outputs": num_outputs, "inputs": num_inputs, None: size}[share.of]
        if shared % size:
            raise ValueError(f"{size} devices cannot share {shared} {share.of} of a linear map")
        super().__init__(
            num_inputs // size if share.of == "inputs" else num_inputs,
            num_outputs // size if share.of == "outputs" else num_outputs,
            bias=bias,
        )
        self.precision = precision
        self.share = share

    @property
    def whole_shape(self) -> tuple[int, int]:
        """Outputs and inputs of all members together."""
        num_outputs = self.share.count if self.share.of == "outputs" else 1
        num_inputs = self.share.count if self.share.of == "inputs" else 1
        return self.out_features * num_outputs, self.in_features * num_inputs


class VocabEmbedding(nn.Embedding):
    """Embeddings of tokens; members share the vocabulary, if it divides."""

    def __init__(self, num_tokens: int, width: int, mesh: Mesh = SINGLE) -> None:
        self.share = Share(mesh, None if num_tokens % mesh.size else "outputs")
        self._count = num_tokens // mesh.size if self.share.of else num_tokens
        super().__init__(self._count, width)

    def forward(self, input: Tensor) -> Tensor:
        """Shapes: (N,); returns (N, C)."""
        mesh = self.share.mesh
        if mesh.size == 1 or self.share.of is None:
            return super().forward(input)
        local = input - mesh.rank * self._count
        is_own = (local >= 0) & (local < self._count)
        rows = super().forward(local.clamp(0, self._count - 1))
        return mesh.all_reduce(rows.masked_fill(~is_own[:, None], 0))


class Reordered(nn.Module):
    """A map whose weights are kept for its inputs in another order: those that share a scale side by side."""

    order: Tensor

    def __init__(self, linear: nn.Module, order: Tensor) -> None:
        """`order` names the input of each column. Shapes: (K,)."""
        super().__init__()
        self.linear = linear
        self.register_buffer("order", order)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (M, K); returns (M, N)."""
        return self.linear(x[:, self.order])


class _ReorderedProduct:
    """A product that is given its inputs in another order."""

    def __init__(self, product: Product, order: Tensor) -> None:
        self._product = product
        self._order = order
        self.max_tokens = product.max_tokens
        self.takes_before, self.adds = product.takes_before, product.adds

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        return self._product(x[:, self._order], add_to)


#: Adds something to a product in place, given its inputs. Shapes: (M, N), (M, K).
Delta = Callable[[Tensor, Tensor], None]


class _AdaptedProduct:
    """A product, and what is added to it."""

    def __init__(self, product: Product, before: Before, delta: Delta) -> None:
        self._product, self._before, self._delta = product, before, delta
        self.max_tokens = product.max_tokens
        self.takes_before, self.adds = product.takes_before, product.adds

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        inputs = self._before(x) if self.takes_before else x
        y = self._product(x, add_to)
        self._delta(y, inputs)
        return y


class Stream:
    """What goes through layers; what one has added waits for the next norm, which may add it in the same pass."""

    def __init__(self, x: Tensor, is_own: bool = False) -> None:
        """`is_own`: nobody else reads x, which is changed in place. Shapes: (M, C)."""
        self._x = x
        self._is_own = is_own
        self._delta: Tensor | None = None

    def add(self, delta: Tensor) -> None:
        """Shapes: (M, C)."""
        self._x, self._delta = self.tensor(), delta

    def tensor(self) -> Tensor:
        """All of it. Shapes: (M, C)."""
        if self._delta is not None:
            self._x = self._x.add_(self._delta) if self._is_own else self._x + self._delta
            self._delta = None
        return self._x

    def normed(self, norm: RMSNorm, add_norm: AddNorm) -> Tensor:
        """All of it, normalised. Shapes: (M, C)."""
        self._x, y = add_norm(self._x, self._delta, norm.weight, norm.eps)
        self._delta = None
        return y


class Linear:
    """Maps of one input, side by side."""

    def __init__(
        self,
        owner: nn.Module,
        *names: str,
        before: Before | None = None,
        after: RMSNorm | None = None,
        gathers: bool = False,
    ) -> None:
        """`names` are those of `LinearWeights` in `owner`, where loaders may put others in their place.

        Sums over shares of inputs are added up; shares of outputs stay apart, unless it `gathers`.
        """
        self._owner = owner
        self._names = names
        self._before = before or Before()
        self._after = after
        share: Share = getattr(owner.get_submodule(names[0]), "share", WHOLE)
        is_joined = share.of == "inputs" or (share.of == "outputs" and gathers)
        self._mesh: Mesh = share.mesh if is_joined else SINGLE
        self._join = self._mesh.all_gather if gathers else self._mesh.all_reduce
        self._ops: Ops | None = None
        self._plain: Product = PlainProduct(self._parts, None)
        self.product: Product = self._plain
        self._unadapted: tuple[Product, Product] | None = None

    @property
    def is_bound(self) -> bool:
        """Whether an operator computes all maps at once."""
        return self.product is not self._plain

    @property
    def is_adapted(self) -> bool:
        """Whether something is added to every product."""
        return self._unadapted is not None

    @property
    def is_whole(self) -> bool:
        """Whether `product` alone computes all that a call does."""
        is_alone = self._mesh.size == 1 and self._after is None
        return is_alone and (self.product.takes_before or not self._before)

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        """Compute with these operators from now on; `dtype` is the engine's."""
        self._ops = ops
        dtype = ops.product_dtype(dtype)
        parts = self._parts()
        self._plain = PlainProduct(self._parts, dtype)
        self.product = self._bind_reordered(ops, parts, dtype) or self._plain

    @property
    def parts(self) -> list[tuple[str, nn.Module]]:
        """The maps in their order, by their names in the module that owns them."""
        return list(zip(self._names, self._parts(), strict=True))

    def adapt(self, delta: Delta | None) -> None:
        """Add something to every product from now on, or, with None, nothing any more."""
        if self._unadapted is not None:
            self.product, self._plain = self._unadapted
            self._unadapted = None
        if delta is not None:
            self._unadapted = self.product, self._plain
            self.product, self._plain = (
                _AdaptedProduct(each, self._before, delta) for each in self._unadapted
            )

    def __call__(self, x: Tensor | Stream, add_to: Stream | None = None) -> Tensor:
        """Shapes: x (..., K), or (..., 2 K) for a gate; returns (..., N), which is added to `add_to` if it is given."""
        if isinstance(x, Tensor) and x.dim() > 2:
            return self(x.flatten(0, -2), add_to).unflatten(0, x.shape[:-1])
        num_tokens = (x.tensor() if isinstance(x, Stream) else x).shape[0]
        product = self.product if num_tokens <= self.product.max_tokens else self._plain
        inputs = self._prepare(x, product)
        if add_to is not None and product.adds and self._mesh.size == 1 and self._after is None:
            return product(inputs, add_to.tensor())
        y = self._join(product(inputs))
        if self._after is not None:
            y = self._after(y)
        if add_to is not None:
            add_to.add(y)
        return y

    def _bind_reordered(
        self, ops: Ops, parts: Sequence[nn.Module], dtype: torch.dtype
    ) -> Product | None:
        """The operator's product. Parts whose inputs have one order are given these once, before a norm or gate."""
        orders = [part.order for part in parts if isinstance(part, Reordered)]
        if not orders:
            return _bind(ops, parts, self._before, dtype)
        order = orders[0]
        if len(orders) < len(parts) or not all(torch.equal(order, other) for other in orders):
            return None
        before = self._before
        if before.norm is not None:
            gain = before.norm.weight
            norm = RMSNorm(len(order), before.norm.eps).to(gain.device, gain.dtype)
            norm.weight = nn.Parameter(gain[order], False)
            before = Before(norm=norm)
        inner = [part.linear for part in parts if isinstance(part, Reordered)]
        bound = _bind(ops, inner, before, dtype)
        if bound is None:
            return None
        if bound.takes_before and before.gate is not None:
            order = torch.cat([order, order + len(order)])
        return _ReorderedProduct(bound, order)

    def _prepare(self, x: Tensor | Stream, product: Product) -> Tensor:
        """What the product is given."""
        before = self._before
        if isinstance(x, Stream):
            if before.norm is None or product.takes_before:
                return x.tensor()
            return x.normed(before.norm, self._ops["add_norm"] if self._ops else add_norm)
        if not before or product.takes_before:
            return x
        if before.gate is F.silu and self._ops is not None:
            return self._ops["gate"](x)
        return before(x)

    def _parts(self) -> Sequence[nn.Module]:
        return [_as_linear(self._owner.get_submodule(name)) for name in self._names]


def _bind(
    ops: Ops, parts: Sequence[nn.Module], before: Before, dtype: torch.dtype
) -> Product | None:
    kinds = {
        (getattr(part, "op", "linear_float"), getattr(part, "group_size", 0)) for part in parts
    }
    return ops[kinds.pop()[0]](parts, before, dtype) if len(kinds) == 1 else None


def _as_linear(module: nn.Module) -> nn.Module:
    """Embeddings as the map that is tied to them."""
    if not isinstance(module, nn.Embedding):
        return module
    linear = nn.Linear(*reversed(module.weight.shape), bias=False, device="meta")
    linear.weight = module.weight
    return linear
