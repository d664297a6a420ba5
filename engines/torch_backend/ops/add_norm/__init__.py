"""Residual addition and norm in one pass over the row."""

from torch import Tensor

from engines.torch_backend.ops.add_norm.reference import AddNorm, add_norm
from engines.torch_backend.ops.registry import Op, Site
from engines.torch_backend.ops.triton_kernel import triton_candidate


def _example(add_norm: AddNorm, site: Site) -> list[Tensor]:
    width = site.text.hidden_size
    x, delta, gain = (site.numbers(rows, width, seed=rows) for rows in (3, 3, 1))
    _, first = add_norm(x, None, gain[0], 1e-5)
    return [first, *add_norm(x, delta, gain[0], 1e-5)]


OP = Op("add_norm", add_norm, (triton_candidate("add_norm", "add_norm"),), _example)
