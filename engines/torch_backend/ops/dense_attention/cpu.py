"""Dense attention by the C++ kernel."""

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from engines.torch_backend.ops import native
from engines.torch_backend.ops.dense_attention.reference import DenseAttention, attend
from engines.torch_backend.ops.native.library import FLOAT_KINDS, STRUCTS
from engines.torch_backend.ops.registry import Site

_LANES = 8


def build(site: Site) -> DenseAttention:
    """The kernel for supported heads, else the reference."""
    library, min_fused = native.load(site.level), site.level.min_fused_tokens

    def attend_dense(
        query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[tuple[int, int]]
    ) -> Tensor:
        is_fused = query.dtype is torch.bfloat16 and max(lengths)[0] >= min_fused
        if is_fused or not reads(query):
            return attend(query, key, value, lengths)
        num_heads, head_dim = query.shape[1:]
        assert key.stride() == value.stride()
        assert query.stride()[1:] == key.stride()[1:] == (head_dim, 1)
        out = query.new_empty(len(query), num_heads * head_dim)
        offsets = [
            (ctypes.c_int64 * (len(lengths) + 1))(0, *accumulate(counts))
            for counts in zip(*lengths, strict=True)
        ]
        step = STRUCTS["DenseAttention"](
            FLOAT_KINDS[query.dtype],
            num_heads,
            head_dim,
            torch.get_num_threads(),
            len(lengths),
            *map(ctypes.addressof, offsets),
            query.stride(0),
            key.stride(0),
            *(tensor.data_ptr() for tensor in (query, key, value, out)),
        )
        library.dense_attention(ctypes.byref(step))
        return out

    return attend_dense


def reads(query: Tensor) -> bool:
    """Whether the kernel supports this device, dtype and head width."""
    is_float = query.dtype in (torch.float32, torch.bfloat16)
    return query.device.type == "cpu" and is_float and query.shape[-1] % _LANES == 0
