"""Torch's own flash attention over runs.

`torch.nn.attention.varlen` is young: 2.11 has no grouped heads, and what it takes may change.
"""

import inspect
from typing import Any

from torch import Tensor

from engines.torch_backend.ops.registry import Site
from engines.torch_backend.ops.varlen_attention.reference import AttendRuns, Runs


def lacks(site: Site) -> str:
    """Why torch has none."""
    is_there = site.device.type == "cuda" or site.interprets
    return "" if is_there else "torch's flash attention over runs is for GPUs"


def build(site: Site) -> AttendRuns:
    """Torch's function behind the reference's signature."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - of GPUs

    return _adapt(varlen_attn)


def _adapt(function: Any) -> AttendRuns:
    """Grouped heads by torch where it can, else by repeating."""
    has_groups = "enable_gqa" in inspect.signature(function).parameters

    def attend(
        query: Tensor, key: Tensor, value: Tensor, runs: Runs, window: int | None = None
    ) -> Tensor:
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
            # each token sees what is before it, or so much of it, and itself
            window_size=(-1 if window is None else window - 1, 0),
            **options,
        )

    return attend
