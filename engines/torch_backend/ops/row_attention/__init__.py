"""Attention of rows to themselves, packed one after another without padding."""

from torch import Tensor

from engines.torch_backend.ops import native
from engines.torch_backend.ops.registry import Candidate, Op, Site
from engines.torch_backend.ops.row_attention.cpu import build
from engines.torch_backend.ops.row_attention.reference import AttendRows, attend_rows

_LENGTHS = (1, 5, 5, 6, 13, 37)


def _example(attend: AttendRows, site: Site) -> list[Tensor]:
    """Rows of odd lengths."""
    joined = 3 * site.numbers(sum(_LENGTHS), 3, 3, site.text.head_dim)
    return [attend(joined, _LENGTHS)]


OP = Op(
    "row_attention",
    attend_rows,
    (Candidate("cpu", build, native.lacks, tolerance=lambda site: max(1e-5, site.tolerance)),),
    _example,
)
