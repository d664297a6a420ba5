"""Products with floating-point weights as they are stored."""

from dataclasses import replace

import torch
from torch import Tensor

from engines.torch_backend.ops import products
from engines.torch_backend.ops.joined import JOINED
from engines.torch_backend.ops.native.library import FLOAT_KINDS
from engines.torch_backend.ops.native.products import native_candidate
from engines.torch_backend.ops.products import Bind
from engines.torch_backend.ops.registry import Op, Site


def _example(bind: Bind, site: Site) -> list[Tensor]:
    return products.example(bind, site, lambda shape: products.make_float(site, shape))


def _variants(site: Site) -> list[Site]:
    """Everything that weights may be stored in, and an engine of bfloat16 where kernels round as it does."""
    stored = [replace(site, stored=dtype) for dtype in FLOAT_KINDS]
    is_rounded = site.level.max_rounded_tokens > 0
    return [*stored, replace(site, dtype=torch.bfloat16)] if is_rounded else stored


def _tolerance(site: Site) -> float:
    """In bfloat16 the reference rounds what it returns."""
    return 1e-5 if site.dtype is torch.float32 else 2**-7


OP = Op(
    "linear_float",
    products.bind,
    (native_candidate(_tolerance, _variants), JOINED),
    _example,
)
