"""Run by run, in float32 and in the plainest form.

Shape letters: R runs, N new tokens of all, T tokens of all contexts, H query heads, K key/value heads, D head width.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Runs:
    """Where runs begin and end: of new tokens, and of the contexts that they end."""

    new_ends: Tensor  #: (R + 1,) int32, from 0
    context_ends: Tensor  #: (R + 1,) int32, from 0
    max_new: int
    max_context: int

    @classmethod
    def create(cls, shares: list[tuple[int, int]], device: torch.device) -> "Runs":
        """`shares` are (new tokens, tokens of the context with them) of each run."""
        ends = torch.tensor([(0, 0), *shares]).cumsum(0).to(torch.int32).to(device)
        num_new, num_context = zip(*shares, strict=True)
        return cls(ends[:, 0].contiguous(), ends[:, 1].contiguous(), max(num_new), max(num_context))


#: (query (N, H, D), key (T, K, D), value (T, K, D), runs) to (N, H, D); the last new token sees all
#: of its context, or a window's tokens, itself included.
AttendRuns = Callable[[Tensor, Tensor, Tensor, Runs, int | None], Tensor]


def attend_runs(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, window: int | None = None
) -> Tensor:
    """Shapes: as of `AttendRuns`; returns float32."""
    ends = (runs.new_ends, runs.context_ends)
    shares = [tuple(share) for share in torch.stack([x.diff() for x in ends], 1).tolist()]
    return attend_one_by_one(query, key, value, shares, window)


def attend_one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shares: list[tuple[int, int]],
    window: int | None = None,
) -> Tensor:
    """The same in float32 and in the plainest form. Shapes: as of `AttendRuns`."""
    parts = []
    starts = [0, 0]
    for num_new, num_context in shares:
        run = slice(starts[0], starts[0] + num_new)
        context = slice(starts[1], starts[1] + num_context)
        offset = num_context - num_new
        mask = torch.ones(num_new, num_context, dtype=torch.bool, device=query.device).tril(offset)
        if window is not None:
            mask = mask.triu(offset - window + 1)
        out = F.scaled_dot_product_attention(
            *(
                x.float().transpose(0, 1).unsqueeze(0)
                for x in (query[run], key[context], value[context])
            ),
            attn_mask=mask,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(out.squeeze(0).transpose(0, 1))
        starts = [run.stop, context.stop]
    return torch.cat(parts)
