"""Queries and keys turned by their positions; keys and values kept in the paged pool."""

import torch
from torch import Tensor

from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.ops.registry import Op, Site
from engines.torch_backend.ops.rotate_keep.reference import RotateKeep, rotate_keep
from engines.torch_backend.ops.triton_kernel import triton_candidate


def _example(rotate_keep: RotateKeep, site: Site) -> list[Tensor]:
    text, pool = site.text, site.pool()
    width = (text.num_heads + 2 * text.num_kv_heads) * text.head_dim
    slots = torch.tensor([5, site.block_size, 2], device=site.device)
    positions = torch.tensor([0, 3, 1], device=site.device)
    rotary = RotaryTable(text, 4, site.dtype, site.device)
    turned = rotate_keep(site.numbers(3, width), rotary, positions, slots, pool, 0)
    return [*turned, *pool.read(0, torch.arange(8, device=site.device))]


OP = Op("rotate_keep", rotate_keep, (triton_candidate("rotate_keep", "rotate_keep"),), _example)
