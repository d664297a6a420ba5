"""Linear maps of one input with what is around them, each group in one call of a C++ kernel.

A group's reference implementation is the modules themselves. Which computes is decided here: integers always go to the kernel,
floating-point weights as long as it is faster than torch over weights widened strip by strip.

Shape letters: M tokens, K inputs, N outputs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.layers.activation import quick_gelu
from engines.torch_backend.models.llama import RMSNorm
from engines.torch_backend.ops.cpu.kernels import CpuKernels
from engines.torch_backend.ops.cpu.library import FLOAT_KINDS, Before, Product, Weights
from engines.torch_backend.ops.cpu.packed_linear import PackedLinear, product_dtype

_STRIP_WEIGHTS = 1 << 21  # eight MB in float32


class FusedLinear:
    """Linear maps of one input, side by side, with a norm, a gate or an activation before them."""

    def __init__(
        self,
        kernels: CpuKernels,
        modules: Sequence[nn.Module],
        dtype: torch.dtype,
        norm: RMSNorm | None = None,
        gate: Callable[[Tensor], Tensor] | None = None,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`dtype` is that of torch's products, whose results it holds: float32 instead of float16, which cannot. `gate`: inputs are pairs (g, u), and gate(g) * u is multiplied."""
        self._modules = modules
        self._dtype = product_dtype(dtype)
        self._norm = norm
        self._gate = gate
        self._activation = activation
        self._is_prepared = False  # by the kernel
        self._product: Product | None = None
        self.max_tokens = 0  #: beyond these torch computes
        weights = [_to_weights(module) for module in modules]
        usable = [part for part in weights if part is not None and part.kind in kernels.kinds]
        if len(usable) < len(modules) or len({part.kind for part in usable}) > 1:
            return
        self.max_tokens = kernels.level.max_float_tokens if usable[0].group == 0 else 1 << 30
        before, gain, eps = Before.NOTHING, None, 0.0
        if norm is not None:
            before, gain, eps = Before.RMS_NORM, norm.weight.float(), norm.eps
        elif gate is F.silu:
            before = Before.SILU_GATE
        elif activation is quick_gelu:
            before = Before.QUICK_GELU
        self._is_prepared = before is not Before.NOTHING
        self._product = Product(kernels.library, usable, kernels.bits, before, gain, eps)

    @property
    def whole_product(self) -> Product | None:
        """The product, if it computes all there is to compute, of up to `max_tokens` tokens."""
        is_whole = self._is_prepared or (self._norm or self._gate or self._activation) is None
        return self._product if is_whole else None

    def __call__(self, x: Tensor, add_to: Tensor | None = None) -> Tensor:
        """Shapes: x float32 (M, K), or (M, 2 K) for a gate; returns (M, N), in `add_to` if it is given."""
        if self._product is None or x.shape[0] > self.max_tokens:
            y = self._by_torch(self._prepare(x))
            return y if add_to is None else add_to.add_(y)
        return self._product(x if self._is_prepared else self._prepare(x), add_to)

    def _prepare(self, x: Tensor) -> Tensor:
        if self._norm is not None:
            return F.rms_norm(x, x.shape[-1:], self._norm.weight.float(), self._norm.eps)
        if self._gate is not None:
            gated, factor = x.chunk(2, dim=1)
            return self._gate(gated) * factor
        return x if self._activation is None else self._activation(x)

    def _by_torch(self, x: Tensor) -> Tensor:
        x = x.to(self._dtype)
        return torch.cat([_multiply(module, x).float() for module in self._modules], dim=1)


def _multiply(module: nn.Module, x: Tensor) -> Tensor:
    if not isinstance(module, nn.Linear) or {p.dtype for p in module.parameters()} == {x.dtype}:
        return module(x)
    num_rows = max(1, _STRIP_WEIGHTS // x.shape[1])
    y = x.new_empty(x.shape[0], module.out_features)
    for start in range(0, module.out_features, num_rows):
        rows = module.weight[start : start + num_rows].to(x.dtype)
        y[:, start : start + num_rows] = F.linear(x, rows)
    return y if module.bias is None else y.add_(module.bias)


def _to_weights(module: nn.Module) -> Weights | None:
    """What a kernel reads of a module; None if there is none for it."""
    if isinstance(module, PackedLinear):
        return module.to_weights()
    if not isinstance(module, nn.Linear) or module.weight.dtype not in FLOAT_KINDS:
        return None
    bias = None if module.bias is None else module.bias.float()
    kind = FLOAT_KINDS[module.weight.dtype]
    shape = (module.out_features, module.in_features)
    return Weights(kind, *shape, module.weight.contiguous(), bias=bias)
