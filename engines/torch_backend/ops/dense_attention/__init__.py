"""Dense attention within each of several packed sequences of image or text tokens, without padding."""

from torch import Tensor

from engines.torch_backend.ops import native
from engines.torch_backend.ops.dense_attention.cpu import build
from engines.torch_backend.ops.dense_attention.reference import DenseAttention, attend
from engines.torch_backend.ops.registry import Candidate, Op, Site

_LENGTHS = [(n, n) for n in (1, 5, 5, 6, 13, 37)]


def _example(attend: DenseAttention, site: Site) -> list[Tensor]:
    """Sequences of various lengths, and some queries that attend to all keys."""
    num_tokens = sum(count for count, _ in _LENGTHS)
    joined = 3 * site.numbers(num_tokens, 3, 3, site.text.head_dim)
    query, key, value = joined.unbind(1)
    return [attend(query, key, value, _LENGTHS), attend(query[5:9], key, value, [(4, num_tokens)])]


OP = Op(
    "dense_attention",
    attend,
    (Candidate("cpu", build, native.lacks, tolerance=lambda site: max(1e-5, site.tolerance)),),
    _example,
)
