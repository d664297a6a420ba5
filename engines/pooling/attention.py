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
        seen = F.scaled_dot_product_attention(q, k, v, scale=scaling)  # (n, H, L, D)
        out[0, run.begin : run.end].unflatten(0, rows).copy_(seen.transpose(1, 2))
    return out, None


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
