"""Attention over rows of different lengths, packed one after another without padding, for transformers' modules.

Rows are sorted by length, so that those of one length are one call.

Shape letters: T tokens of all rows, n rows of one length, L tokens of a row, H heads, D head width.
"""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "vlm_packed_rows"
#: From there on two plain products in bfloat16 are faster on a CPU than torch's fused attention.
MIN_PLAIN_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent rows of one length."""

    begin: int  #: in tokens
    num_rows: int
    length: int

    @property
    def end(self) -> int:
        """In tokens."""
        return self.begin + self.num_rows * self.length


def runs_of(lengths: Sequence[int]) -> list[Run]:
    """The runs of sorted rows."""
    runs, begin = [], 0
    for length, rows in groupby(lengths):
        runs.append(Run(begin, len(list(rows)), length))
        begin = runs[-1].end
    return runs


_runs: list[Run] = []  # of the forward pass that is under way; one thread computes


@contextmanager
def packed(runs: list[Run]):
    """Attention within this block is within these rows."""
    _runs[:] = runs
    try:
        yield
    finally:
        _runs.clear()


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Each token sees its own row. Shapes: query, key, value (1, H, T, D); returns (1, T, H, D)."""
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    for run in _runs:
        rows = (run.num_rows, run.length)
        q, k, v = (
            x[0, :, run.begin : run.end].unflatten(1, rows).transpose(0, 1)
            for x in (query, key, value)
        )
        target = out[0, run.begin : run.end].unflatten(0, rows).transpose(1, 2)  # (n, H, L, D)
        if run.length >= MIN_PLAIN_TOKENS and q.dtype is torch.bfloat16 and not q.is_cuda:
            for row in range(run.num_rows):  # one after another: scores are the square of a row
                target[row] = _mix(q[row], k[row], v[row], scaling)
        else:
            target.copy_(F.scaled_dot_product_attention(q, k, v, scale=scaling))
    return out, None


def _mix(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """One row. Shapes: (H, L, D)."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return (query * scale @ key.transpose(-1, -2)).softmax(-1) @ value


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
