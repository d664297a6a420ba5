"""Products with floating-point weights as they are stored."""

from dataclasses import replace

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
    """Everything that weights may be stored in."""
    return [replace(site, stored=dtype) for dtype in FLOAT_KINDS]


OP = Op(
    "linear_float",
    products.bind,
    (native_candidate(lambda site: 1e-5, _variants), JOINED),
    _example,
)
