"""Dense attention in plain torch.

Shape letters: N queries, T keys and values, H heads, D head width, S sequences of equal lengths.
"""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from engines.torch_backend.ops.cpu_level import has_matrix_units

#: Queries, keys, values, and the numbers of queries and keys of each sequence.
DenseAttention = Callable[[Tensor, Tensor, Tensor, Sequence[tuple[int, int]]], Tensor]

#: From this number of keys, two bfloat16 products are faster than torch's fused attention on CPUs without matrix units.
_MIN_PLAIN_TOKENS = 96


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[tuple[int, int]]) -> Tensor:
    """Each query attends to all keys of its sequence. Shapes: query (N, H, D), key and value (T, H, D); returns (N, H * D)."""
    parts, begin, key_begin = [], 0, 0
    is_plain = query.dtype is torch.bfloat16 and not query.is_cuda and not has_matrix_units()
    for (num_queries, num_keys), group in groupby(lengths):
        count = len(list(group))
        stop, key_stop = begin + count * num_queries, key_begin + count * num_keys
        queries = query[begin:stop].unflatten(0, (count, num_queries)).transpose(1, 2)
        keys, values = (
            x[key_begin:key_stop].unflatten(0, (count, num_keys)).transpose(1, 2)
            for x in (key, value)
        )
        if is_plain and num_keys >= _MIN_PLAIN_TOKENS:
            # one sequence at a time, because its scores need memory quadratic in its length
            parts += [_attend_plainly(*each) for each in zip(queries, keys, values, strict=True)]
        else:
            out = F.scaled_dot_product_attention(queries, keys, values)
            parts.append(out.transpose(1, 2).flatten(0, 1))
        begin, key_begin = stop, key_stop
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(1)


def _attend_plainly(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of one sequence. Shapes: (H, n, D); returns (n, H, D)."""
    scaled = query * query.shape[-1] ** -0.5
    return ((scaled @ key.transpose(-1, -2)).softmax(-1) @ value).transpose(0, 1)
