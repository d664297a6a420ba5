"""Flash attention over runs of different lengths in one call, where torch has it and it is right.

Used by `cuda_attention`. `torch.nn.attention.varlen` is young: 2.11 has no grouped heads, and what it takes may
change; so it is tried at the start, on runs that begin at position 0 and runs that go on. Its reference implementation is
`attention.attend_runs`, run by run.

Shape letters: R runs, N new tokens of all, T tokens of all contexts, H query heads, K key/value heads, D head width.
"""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional as F

from engines.torch_backend.models.config import TextConfig

logger = logging.getLogger(__name__)


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


#: (query (N, H, D), key (T, K, D), value (T, K, D), runs) to (N, H, D); the last new token sees all of its context.
AttendRuns = Callable[[Tensor, Tensor, Tensor, Runs], Tensor]


def find_varlen(text: TextConfig, dtype: torch.dtype, device: torch.device) -> AttendRuns | None:
    """Torch's function for this model, if it is there and right."""
    try:
        attend = _adapt(import_module("torch.nn.attention.varlen").varlen_attn)
        complaint = _find_complaint(attend, text, dtype, device)
    except Exception as error:  # a young interface may fail in any way
        complaint = f"{type(error).__name__}: {error}"[:500]
    else:
        if complaint is None:
            return attend
    logger.warning("varlen attention is not used: %s", complaint)
    return None


def _adapt(function: Callable[..., Tensor]) -> AttendRuns:
    """Grouped heads by torch where it can, else by repeating."""
    has_groups = "enable_gqa" in inspect.signature(function).parameters

    def attend(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> Tensor:
        group = query.shape[1] // key.shape[1]
        options = {"enable_gqa": True} if has_groups and group > 1 else {}
        if group > 1 and not has_groups:
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        return function(
            query,
            key,
            value,
            runs.new_ends,
            runs.context_ends,
            runs.max_new,
            runs.max_context,
            window_size=(-1, 0),  # each token sees what is before it, and itself
            **options,
        )

    return attend


def _find_complaint(
    attend: AttendRuns, text: TextConfig, dtype: torch.dtype, device: torch.device
) -> str | None:
    shares = [(7, 7), (3, 9), (1, 5)]
    num_new, num_context = (sum(column) for column in zip(*shares, strict=True))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(rows, heads, text.head_dim, generator=generator).to(device, dtype)
        for rows, heads in (
            (num_new, text.num_heads),
            (num_context, text.num_kv_heads),
            (num_context, text.num_kv_heads),
        )
    )
    found = attend(query, key, value, Runs.create(shares, device))
    difference = (found.float() - attend_one_by_one(query, key, value, shares)).abs().max().item()
    is_right = difference <= 16 * torch.finfo(dtype).eps
    return None if is_right else f"it is off by {difference:.3g}"


def attend_one_by_one(
    query: Tensor, key: Tensor, value: Tensor, shares: list[tuple[int, int]]
) -> Tensor:
    """The same in float32 and in the plainest form. Shapes: as of `AttendRuns`."""
    parts = []
    starts = [0, 0]
    for num_new, num_context in shares:
        run = slice(starts[0], starts[0] + num_new)
        context = slice(starts[1], starts[1] + num_context)
        mask = torch.ones(num_new, num_context, dtype=torch.bool, device=query.device)
        out = F.scaled_dot_product_attention(
            *(
                x.float().transpose(0, 1).unsqueeze(0)
                for x in (query[run], key[context], value[context])
            ),
            attn_mask=mask.tril(diagonal=num_context - num_new),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(out.squeeze(0).transpose(0, 1))
        starts = [run.stop, context.stop]
    return torch.cat(parts)
