"""Linear maps of one input with what is around them, each group in one call of a C++ kernel.

Shape letters: M tokens, K inputs, N outputs.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from engines.torch_backend.layers.activation import quick_gelu
from engines.torch_backend.layers.quantized_linear import QuantizedLinear
from engines.torch_backend.ops import native
from engines.torch_backend.ops.native.library import (
    BFLOAT16_BITS,
    FLOAT_BITS,
    FLOAT_KINDS,
    BoundProduct,
    Weights,
)
from engines.torch_backend.ops.native.library import Before as Kind
from engines.torch_backend.ops.native.library import Kind as Stored
from engines.torch_backend.ops.native.packed_linear import PackedLinear
from engines.torch_backend.ops.products import UNLIMITED, Before, Bind, Product
from engines.torch_backend.ops.registry import Candidate, Site


def native_candidate(
    tolerance: Callable[[Site], float],
    variants: Callable[[Site], Iterable[Site]] = lambda site: (site,),
) -> Candidate:
    """The C++ kernel of a linear operator."""
    return Candidate("cpu", _build, native.lacks, tolerance, variants)


def _build(site: Site) -> Bind:
    library = native.load(site.level)

    def bind(parts: Sequence[nn.Module], before: Before, dtype: torch.dtype) -> Product | None:
        weights = [to_weights(part) for part in parts]
        usable = [part for part in weights if part is not None]
        if len(usable) < len(parts) or len({part.kind for part in usable}) > 1:
            return None
        kind, gain, eps = Kind.NOTHING, None, 0.0
        if before.norm is not None:
            kind, gain, eps = Kind.RMS_NORM, before.norm.weight.float(), before.norm.eps
        elif before.gate is F.silu:
            kind = Kind.SILU_GATE
        elif before.activation is quick_gelu:
            kind = Kind.QUICK_GELU
        elif before.activation is F.gelu:
            kind = Kind.GELU
        bits, max_tokens = _limits(site, usable[0].kind, dtype)
        bound = BoundProduct(library, usable, bits, kind, gain, eps)
        bound.takes_before = kind is not Kind.NOTHING or not before
        bound.max_tokens = max_tokens
        return bound

    return bind


def _limits(site: Site, weights: Stored, dtype: torch.dtype) -> tuple[int, int]:
    """Bits of activations, and for how many tokens the kernel is the fastest."""
    if weights not in FLOAT_KINDS.values():
        return site.bits, UNLIMITED
    is_rounded = weights is Stored.BFLOAT16 and dtype is torch.bfloat16
    if is_rounded and site.level.max_rounded_tokens:
        return BFLOAT16_BITS, site.level.max_rounded_tokens
    return FLOAT_BITS, site.level.max_float_tokens


def to_weights(module: nn.Module) -> Weights | None:
    """What a kernel reads of a module; None if there is none for it."""
    if isinstance(module, QuantizedLinear):
        module = PackedLinear(module)
    if isinstance(module, PackedLinear):
        return module.to_weights()
    if not isinstance(module, nn.Linear) or module.weight.dtype not in FLOAT_KINDS:
        return None
    bias = None if module.bias is None else module.bias.float()
    kind = FLOAT_KINDS[module.weight.dtype]
    shape = (module.out_features, module.in_features)
    return Weights(kind, *shape, module.weight.contiguous(), bias=bias)
