"""Attention of runs of different lengths, each over its own context, in one call."""

import torch
from torch import Tensor

from engines.torch_backend.ops.registry import Candidate, Op, Site
from engines.torch_backend.ops.varlen_attention.reference import AttendRuns, Runs, attend_runs
from engines.torch_backend.ops.varlen_attention.torch_varlen import build, lacks


def _example(attend: AttendRuns, site: Site) -> list[Tensor]:
    """Runs that begin at position 0, and runs that go on."""
    shares = [(7, 7), (3, 9), (1, 5)]
    num_new, num_context = (sum(column) for column in zip(*shares, strict=True))
    generator = torch.Generator().manual_seed(site.seed)
    text = site.text
    query, key, value = (
        torch.randn(rows, heads, text.head_dim, generator=generator).to(site.device, site.dtype)
        for rows, heads in (
            (num_new, text.num_heads),
            (num_context, text.num_kv_heads),
            (num_context, text.num_kv_heads),
        )
    )
    runs = Runs.create(shares, site.device)
    return [attend(query, key, value, runs, window) for window in (None, 3)]


OP = Op("varlen_attention", attend_runs, (Candidate("torch", build, lacks),), _example)
