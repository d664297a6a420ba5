"""Attention of packed rows by the C++ kernel. Shape letters: T tokens of all rows, H heads, D head width."""

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from engines.torch_backend.ops import native
from engines.torch_backend.ops.native.library import FLOAT_KINDS, RowAttentionStruct
from engines.torch_backend.ops.registry import Site
from engines.torch_backend.ops.row_attention.reference import AttendRows, attend_rows

_LANES = 8


def build(site: Site) -> AttendRows:
    """The kernel where it reads such rows and is the faster one, else the reference."""
    library = native.load(site.level)

    def attend(joined: Tensor, lengths: Sequence[int]) -> Tensor:
        if not can_attend(joined):
            return attend_rows(joined, lengths)
        joined = joined.contiguous()
        _, _, num_heads, head_dim = joined.shape
        out = joined.new_empty(len(joined), num_heads * head_dim)
        begins = (ctypes.c_int64 * (len(lengths) + 1))(0, *accumulate(lengths))
        rows = RowAttentionStruct(
            FLOAT_KINDS[joined.dtype],
            num_heads,
            head_dim,
            torch.get_num_threads(),
            len(lengths),
            ctypes.addressof(begins),
            joined.data_ptr(),
            out.data_ptr(),
        )
        library.row_attention(ctypes.byref(rows))
        return out

    return attend


def can_attend(joined: Tensor) -> bool:
    """Whether the kernel reads such numbers."""
    return (
        joined.device.type == "cpu"
        and joined.dtype in (torch.float32, torch.bfloat16)
        and joined.shape[-1] % _LANES == 0
    )
