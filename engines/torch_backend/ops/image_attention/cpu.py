"""Attention of images' tokens by the C++ kernel, of numbers that it reads.

Shape letters: B images, T tokens of an image, t of them that ask, D head width.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from engines.torch_backend.ops import native
from engines.torch_backend.ops.image_attention.reference import mix_values
from engines.torch_backend.ops.native.library import FullAttentionStruct, Library
from engines.torch_backend.ops.registry import Site

_LANES = 8


def build(site: Site) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The kernel where it reads such heads, else the reference."""
    library = native.load(site.level)

    def mix(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if not can_mix(queries):
            return mix_values(queries, keys, values)
        return mix_by_kernel(library, queries, keys, values)

    return mix


def can_mix(queries: Tensor) -> bool:
    """Whether the kernel reads such numbers."""
    return queries.dtype == torch.float32 and queries.shape[-1] % _LANES == 0


def mix_by_kernel(library: Library, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of some queries to everything; views as `split_heads` makes them are read where they lie.

    Shapes: (B, heads, t, D), (B, heads, T, D), float32; returns (B, t, heads * D).
    """
    assert queries.stride(3) == keys.stride(3) == 1
    assert keys.stride() == values.stride()
    num_images, num_heads, num_queries, head_dim = queries.shape
    out = torch.empty(num_images, num_queries, num_heads * head_dim)
    step = FullAttentionStruct(
        num_images,
        num_heads,
        head_dim,
        torch.get_num_threads(),
        num_queries,
        keys.shape[2],
        *queries.stride()[:3],
        *keys.stride()[:3],
        *(tensor.data_ptr() for tensor in (queries, keys, values, out)),
    )
    library.full_attention(ctypes.byref(step))
    return out
