"""Attention of images' tokens to all of their image."""

from collections.abc import Callable

from torch import Tensor

from engines.torch_backend.ops import native
from engines.torch_backend.ops.image_attention.cpu import build
from engines.torch_backend.ops.image_attention.reference import mix_values
from engines.torch_backend.ops.registry import Candidate, Op, Site

MixValues = Callable[[Tensor, Tensor, Tensor], Tensor]


def _example(mix_values: MixValues, site: Site) -> list[Tensor]:
    """All and some of the tokens, of two images with odd sizes."""
    projected = 3 * site.numbers(2, 37, 3, 3, site.text.head_dim).permute(2, 0, 3, 1, 4)
    queries, keys, values = projected.unbind(0)
    return [mix_values(part, keys, values) for part in (queries, queries[:, :, 5:9])]


OP = Op(
    "image_attention",
    mix_values,
    (Candidate("cpu", build, native.lacks, tolerance=lambda site: 1e-5),),
    _example,
)
