"""A step's attention: rotation, keeping keys and values, and all sequences over their own contexts."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import PLAIN, Heads, Span, plan_attention
from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.ops import native
from engines.torch_backend.ops.native.library import FLOAT_KINDS
from engines.torch_backend.ops.registry import Candidate, Op, Site
from engines.torch_backend.ops.step_attention.cpu import build
from engines.torch_backend.ops.step_attention.reference import CreateAttention, create_attention

#: A short and a long context, whose blocks lie apart, beside a prompt.
SPANS = [Span(0, 1, 2, [7]), Span(1, 1, 90, [5, 0, 3, 9, 8, 2]), Span(2, 3, 0, [4])]
POSITIONS = [2, 90, 0, 1, 2]


def _example(create: CreateAttention, site: Site) -> list[Tensor]:
    text = site.text
    plan = plan_attention(SPANS, 16, site.dtype, site.device)
    pool = KVCachePool(text, 10, 16, site.dtype, site.device)
    for stored in pool.blocks(1):
        stored.copy_(site.numbers(*stored.shape))
    rotation = RotaryTable(text, 128, site.dtype, site.device).at(torch.tensor(POSITIONS))
    width = (text.num_heads + 2 * text.num_kv_heads) * text.head_dim
    attend = create(text, pool, plan, rotation)
    norms = [RMSNorm(text.head_dim, 1e-5).requires_grad_(False) for _ in range(2)]
    for seed, norm in enumerate(norms):
        norm.weight = nn.Parameter(site.numbers(text.head_dim, seed=seed), False)
    found = []
    for heads in (PLAIN, Heads(*norms, window=2), Heads(window=70), Heads(turns=False)):
        found += [
            attend(1, site.numbers(5, width).float(), heads),
            *map(torch.clone, pool.blocks(1)),
        ]
    return found


def _variants(site: Site) -> list[Site]:
    """Everything that keys and values may be kept in."""
    return [replace(site, dtype=dtype) for dtype in FLOAT_KINDS]


def _tolerance(site: Site) -> float:
    return max(1e-5, 2 * torch.finfo(site.dtype).eps)


OP = Op(
    "step_attention",
    create_attention,
    (Candidate("cpu", build, native.lacks, _tolerance, _variants),),
    _example,
)
