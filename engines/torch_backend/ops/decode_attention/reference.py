"""Nothing here waits for the device or looks at a number on the host, so that a CUDA graph can hold all of it.

Shape letters: S sequences, H query heads, K key/value heads, D head width, T tokens of the longest context that a
block table can name.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool

AttendDecodes = Callable[[KVCachePool, int, Tensor, Tensor, Tensor, int | None], Tensor]


def attend_decodes(
    pool: KVCachePool,
    layer: int,
    query: Tensor,
    tables: Tensor,
    lengths: Tensor,
    window: int | None = None,
) -> Tensor:
    """One new token of each sequence over its context, which the pool holds; of a window, over the last so many tokens.

    Nothing beyond a sequence's length is looked at, in whatever state it is; a length of 0 gives zeros.
    Shapes: query (S, H, D), tables (S, blocks), lengths (S,); returns (S, H * D).
    """
    num_sequences, num_heads, head_dim = query.shape
    keys, values = pool.read(layer, tables.flatten())
    num_kv_heads = keys.shape[1]
    by_sequence = (num_sequences, -1, num_kv_heads, head_dim)
    keys, values = keys.view(by_sequence), values.view(by_sequence)
    places = torch.arange(keys.shape[1], device=query.device)
    unseen = places >= lengths[:, None]  # (S, T)
    if window is not None:
        unseen |= places < lengths[:, None] - window
    values = values.masked_fill(unseen[:, :, None, None], 0)
    grouped = query.view(num_sequences, num_kv_heads, -1, head_dim).float()
    scores = torch.einsum("skgd,stkd->skgt", grouped, keys.float()) / head_dim**0.5
    weights = scores.masked_fill(unseen[:, None, None], -torch.inf).softmax(-1)
    weights = weights.masked_fill(unseen[:, None, None], 0)
    out = torch.einsum("skgt,stkd->skgd", weights, values.float())
    return out.to(query.dtype).reshape(num_sequences, num_heads * head_dim)
