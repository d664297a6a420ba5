"""Products of one input with linear maps side by side: the reference of `linear_float`, `linear_int8` and `linear_int4`.

These operators are functions `bind(parts, before, dtype)` that return a `Product`, or None for parts that are not for
them: what is computed with weights may be laid out for it first.

Shape letters: M tokens, K inputs, N outputs of all parts together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.layers.quantized_linear import Int4Linear, Int8Linear
from engines.torch_backend.ops.registry import Site

UNLIMITED = 1 << 30
STRIP_WEIGHTS = 1 << 21  # eight MB in float32


@dataclass(frozen=True, slots=True)
class Before:
    """What is done to an input before it is multiplied: one of these at most."""

    norm: RMSNorm | None = None
    gate: Callable[[Tensor], Tensor] | None = None  #: inputs are pairs (g, u): gate(g) * u
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


class Product(Protocol):
    """A bound product. What it does not do itself, its caller does: see `multiply`."""

    max_tokens: int  #: for more tokens the reference is faster
    takes_before: bool  #: whether it does itself what is before
    adds: bool  #: whether it adds to a float32 tensor in place

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Shapes: (M, K); returns (M, N), in `add_to` if it is given."""
        ...


Bind = Callable[[Sequence[nn.Module], Before, torch.dtype], Product | None]


class PlainProduct:
    """The parts' own arithmetic, one after another, in one dtype whatever the weights' is."""

    max_tokens = UNLIMITED
    takes_before = adds = False

    def __init__(self, parts: Callable[[], Sequence[nn.Module]], dtype: torch.dtype | None) -> None:
        """`parts` may be others in each call; `dtype` None is that of the input."""
        self._parts = parts
        self._dtype = dtype

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Shapes: (M, K); returns (M, N), of the dtype of x."""
        assert add_to is None
        inputs = x.to(self._dtype or x.dtype)
        outputs = [_multiply(part, inputs).to(x.dtype) for part in self._parts()]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def bind(parts: Sequence[nn.Module], before: Before, dtype: torch.dtype) -> Product:
    """The reference."""
    return PlainProduct(lambda: parts, dtype)


def multiply(product: Product, before: Before, x: Tensor, add_to: Tensor | None = None) -> Tensor:
    """All of a product, whatever of it is bound. Shapes: x (M, K); returns (M, N)."""
    if not product.takes_before:
        x = before(x)
    if add_to is None or product.adds:
        return product(x, add_to)
    return add_to.add_(product(x))


def _multiply(module: nn.Module, x: Tensor) -> Tensor:
    if not isinstance(module, nn.Linear) or {p.dtype for p in module.parameters()} == {x.dtype}:
        return module(x)
    num_rows = max(1, STRIP_WEIGHTS // x.shape[-1])
    y = x.new_empty(*x.shape[:-1], module.out_features)
    for start in range(0, module.out_features, num_rows):
        rows = module.weight[start : start + num_rows].to(x.dtype)
        y[..., start : start + num_rows] = F.linear(x, rows)
    return y if module.bias is None else y.add_(module.bias)


def example(bind: Bind, site: Site, make: Callable[[tuple[int, int]], nn.Module]) -> list[Tensor]:
    """Products of `make(shape)` alone, and of two side by side with each that may be before, added to something."""
    stream = site.dtype if site.cpu_kernels == "off" else torch.float32

    def numbers(*shape: int, seed: int) -> Tensor:
        return site.numbers(*shape, seed=seed).to(stream)

    width = 3 * site.text.hidden_size  # groups, and a part of one
    alone = _bound(bind, [make((50, width))], Before(), site.dtype)
    found = [multiply(alone, Before(), numbers(rows, width, seed=rows)) for rows in (1, 3, 6, 64)]
    norm = RMSNorm(width, 1e-5).to(site.device, stream).requires_grad_(False)
    norm.weight.copy_(site.numbers(width, seed=5))
    for before in (Before(norm=norm), Before(gate=F.silu)):
        parts = [make((48, width)), make((17, width))]
        x = 3 * numbers(5, width * (2 if before.gate else 1), seed=1)
        added = numbers(5, 65, seed=4)
        found.append(multiply(_bound(bind, parts, before, site.dtype), before, x, added))
    return found


def _bound(bind: Bind, parts: list[nn.Module], before: Before, dtype: torch.dtype) -> Product:
    return bind(parts, before, dtype) or PlainProduct(lambda: parts, dtype)


def make_int8(site: Site, shape: tuple[int, int]) -> nn.Module:
    """An example's weights."""
    linear = Int8Linear(shape, None, site.dtype)
    linear.integers = (site.numbers(*shape).float() * 127).to(torch.int8)
    linear.scale = site.numbers(shape[0], seed=3)
    return linear


def make_int4(site: Site, shape: tuple[int, int], is_narrow: bool) -> nn.Module:
    """An example's weights, with scales that bfloat16 holds or not."""
    linear = Int4Linear(shape, None, site.dtype)
    linear.pairs = (site.numbers(shape[0], shape[1] // 2).float().abs() * 255).to(torch.uint8)
    scale_zero = site.numbers(shape[1] // linear.group_size, shape[0], 2, seed=3)
    linear.scale_zero = scale_zero.bfloat16().to(site.dtype) if is_narrow else scale_zero
    return linear


def make_float(site: Site, shape: tuple[int, int]) -> nn.Linear:
    """An example's weights."""
    linear = nn.Linear(shape[1], shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(
        site.numbers(*shape).to(site.stored or site.dtype), requires_grad=False
    )
    return linear
