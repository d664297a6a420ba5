"""Products with int4 weights."""

from torch import Tensor

from engines.torch_backend.ops import products
from engines.torch_backend.ops.joined import JOINED, bind_joined
from engines.torch_backend.ops.native.products import native_candidate
from engines.torch_backend.ops.products import Bind
from engines.torch_backend.ops.registry import Op, Site
from engines.torch_backend.ops.triton_kernel import triton_candidate


def _example(bind: Bind, site: Site) -> list[Tensor]:
    """Scales that bfloat16 holds are kept in it by some."""
    return [
        y
        for is_narrow in (False, True)
        for y in products.example(
            bind, site, lambda shape, narrow=is_narrow: products.make_int4(site, shape, narrow)
        )
    ]


OP = Op(
    "linear_int4",
    products.bind,
    (
        native_candidate(lambda site: {8: 2e-2, 16: 1e-4}[site.bits]),
        triton_candidate(
            "linear_int4",
            "multiply_int4",
            lambda multiply: bind_joined(
                lambda x, linear: multiply(x, linear.pairs, linear.scale_zero)
            ),
        ),
        JOINED,
    ),
    _example,
)
