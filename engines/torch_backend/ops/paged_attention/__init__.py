"""Paged attention: rotate, write keys and values to the cache, and attend."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.ops import native
from engines.torch_backend.ops.native.library import FLOAT_KINDS
from engines.torch_backend.ops.paged_attention import cpu, cuda
from engines.torch_backend.ops.paged_attention.reference import (
    PLAIN,
    CreateAttention,
    Heads,
    create_attention,
)
from engines.torch_backend.ops.registry import Candidate, Op, Site
from engines.torch_backend.step import SequenceRows, StepInputs

#: New and computed tokens of each sequence.
_DECODES = [(1, 2), (1, 90)]
_STEPS = [(_DECODES, False), ([*_DECODES, (3, 0)], False), ([(7, 0), (3, 18)], True)]


def _make_sequences(shares: list[tuple[int, int]], block_size: int) -> list[SequenceRows]:
    """Sequences with scattered blocks."""
    free, start, sequences = list(range(96)), 0, []
    for num_new, num_computed in shares:
        count = -(-(num_new + num_computed) // block_size)
        block_ids = [free.pop(7 * len(free) // 11) for _ in range(count)]
        sequences.append(SequenceRows(start, num_new, num_computed, block_ids))
        start += num_new
    return sequences


def _example(create: CreateAttention, site: Site) -> list[Tensor]:
    """Decodes, prompts and later chunks of prompts, with one and three rows of positions."""
    text, found = site.text, []
    half = text.head_dim // 2
    sections = torch.tensor([half - half // 2, half // 2 - half // 4, half // 4])
    channel_rows = torch.arange(3).repeat_interleave(sections).repeat(2).to(site.device)
    norms = [RMSNorm(text.head_dim, 1e-5).requires_grad_(False).to(site.device) for _ in range(2)]
    for seed, norm in enumerate(norms):
        norm.weight = nn.Parameter(site.numbers(text.head_dim, seed=seed), False)
    width = (text.num_heads + 2 * text.num_kv_heads) * text.head_dim
    for shares, has_sections in _STEPS:
        inputs = StepInputs.create(
            _make_sequences(shares, site.block_size), site.block_size, site.device
        )
        rotary = RotaryTable.create(text, 128, site.dtype, site.device)
        if has_sections:
            rotary = RotaryTable(rotary.cos, rotary.sin, channel_rows, 3)
        rows = torch.arange(rotary.num_rows, device=site.device)[:, None]
        positions = (inputs.indices + rows).squeeze(0)
        pool = site.pool(96)
        attend = create(text.num_heads, pool, inputs, rotary.at_all(positions))
        for heads in (PLAIN, Heads(*norms, window=2), Heads(window=70), Heads(rotates=False)):
            qkv = site.numbers(len(inputs.slots), width)
            found.append(attend(0, qkv.float() if site.cpu_kernels != "off" else qkv, heads))
        found += pool.read(0, inputs.slots[None])
    return found


_NATIVE = Candidate(
    "cpu",
    cpu.build,
    native.lacks,
    lambda site: max(1e-5, 2 * torch.finfo(site.dtype).eps),
    lambda site: [replace(site, dtype=dtype) for dtype in FLOAT_KINDS],  # dtypes of the cache
)
OP = Op("paged_attention", create_attention, (_NATIVE, *cuda.CANDIDATES), _example)
