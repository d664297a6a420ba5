"""Shape letters: T tokens of all rows, n rows, L tokens of a row, H heads, D head width."""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

#: Of joined queries, keys and values, and of the tokens of each row, sorted.
AttendRows = Callable[[Tensor, Sequence[int]], Tensor]

#: From there on two plain products in bfloat16 are faster on a CPU than torch's fused attention.
_MIN_PLAIN_TOKENS = 96


def attend_rows(joined: Tensor, lengths: Sequence[int]) -> Tensor:
    """Each token sees its own row. Shapes: joined (T, 3, H, D); returns (T, H * D)."""
    out = torch.empty_like(joined[:, 0], memory_format=torch.contiguous_format)  # (T, H, D)
    begin = 0
    for length, rows in groupby(lengths):
        num_rows = len(list(rows))
        end = begin + num_rows * length
        queries, keys, values = (
            joined[begin:end].unflatten(0, (num_rows, length)).permute(2, 0, 3, 1, 4)
        )
        target = out[begin:end].unflatten(0, (num_rows, length)).transpose(1, 2)  # (n, H, L, D)
        if length >= _MIN_PLAIN_TOKENS and joined.dtype is torch.bfloat16 and not joined.is_cuda:
            for row in range(num_rows):  # one after another: scores are the square of a row
                target[row] = _mix(queries[row], keys[row], values[row])
        else:
            target.copy_(F.scaled_dot_product_attention(queries, keys, values))
        begin = end
    return out.flatten(1)


def _mix(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One row. Shapes: (H, L, D)."""
    scaled = queries * queries.shape[-1] ** -0.5
    return (scaled @ keys.transpose(-1, -2)).softmax(-1) @ values
