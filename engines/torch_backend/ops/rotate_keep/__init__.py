"""Queries and keys turned by their positions; keys and values kept in the paged pool."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from engines.torch_backend.layers.attention import PLAIN, Heads
from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.ops.registry import Op, Site
from engines.torch_backend.ops.rotate_keep.reference import RotateKeep, rotate_keep
from engines.torch_backend.ops.triton_kernel import triton_candidate


def _example(rotate_keep: RotateKeep, site: Site) -> list[Tensor]:
    """Tokens of one position, and of three that turn channels of their own."""
    text, found = site.text, []
    width = (text.num_heads + 2 * text.num_kv_heads) * text.head_dim
    slots = torch.tensor([5, site.block_size, 2], device=site.device)
    half = text.head_dim // 2
    sections = (half - half // 2, half // 2 - half // 4, half // 4)
    norms = [RMSNorm(text.head_dim, 1e-5).requires_grad_(False).to(site.device) for _ in range(2)]
    for seed, norm in enumerate(norms):
        norm.weight = nn.Parameter(site.numbers(text.head_dim, seed=seed), False)
    for rope_sections, positions, heads in (
        ((), [0, 3, 1], PLAIN),
        ((), [0, 3, 1], Heads(turns=False)),
        (sections, [[0, 3, 1], [2, 0, 3], [1, 2, 0]], Heads(norms[0], norms[1])),
    ):
        pool = site.pool()
        shaped = replace(text, rope_sections=rope_sections)
        rotary = RotaryTable(shaped, 4, site.dtype, site.device)
        places = torch.tensor(positions, device=site.device)
        found += rotate_keep(site.numbers(3, width), rotary, places, slots, pool, 0, heads)
        found += pool.read(0, torch.arange(8, device=site.device))
    return found


OP = Op("rotate_keep", rotate_keep, (triton_candidate("rotate_keep", "rotate_keep"),), _example)
