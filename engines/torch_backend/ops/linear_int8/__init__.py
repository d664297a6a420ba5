"""Products with int8 weights."""

from torch import Tensor

from engines.torch_backend.ops import products
from engines.torch_backend.ops.joined import JOINED, bind_joined
from engines.torch_backend.ops.native.products import native_candidate
from engines.torch_backend.ops.products import Bind
from engines.torch_backend.ops.registry import Op, Site
from engines.torch_backend.ops.triton_kernel import triton_candidate


def _example(bind: Bind, site: Site) -> list[Tensor]:
    return products.example(bind, site, lambda shape: products.make_int8(site, shape))


OP = Op(
    "linear_int8",
    products.bind,
    (
        native_candidate(lambda site: {8: 2e-2, 16: 1e-4}[site.bits]),
        triton_candidate(
            "linear_int8",
            "multiply_int8",
            lambda multiply: bind_joined(
                lambda x, linear: multiply(x, linear.integers, linear.scale)
            ),
        ),
        JOINED,
    ),
    _example,
)
