"""Attention of one new token of each sequence over its whole context in the paged pool."""

import torch
from torch import Tensor

from engines.torch_backend.ops.decode_attention.reference import AttendDecodes, attend_decodes
from engines.torch_backend.ops.registry import Op, Site
from engines.torch_backend.ops.triton_kernel import triton_candidate


def _example(attend_decodes: AttendDecodes, site: Site) -> list[Tensor]:
    text, size = site.text, site.block_size
    query = 4 * site.numbers(4, text.num_heads, text.head_dim)
    tables = torch.tensor([[3, 1, 0], [7, 6, 5], [2, 0, 0], [0, 0, 0]], dtype=torch.int32)
    lengths = torch.tensor([size + 1, 3 * size, 1, 0])
    places = tables.to(site.device), lengths.to(site.device)
    return [attend_decodes(site.pool(), 0, query, *places, window) for window in (None, size + 2)]


OP = Op(
    "decode_attention",
    attend_decodes,
    (triton_candidate("decode_attention", "attend_decodes"),),
    _example,
)
