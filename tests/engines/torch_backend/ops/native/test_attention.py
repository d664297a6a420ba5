"""The C++ attention kernel equals its reference implementation for any mixture of sequences in a step."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.ops.cpu_level import cpu_flags, has_matrix_units
from engines.torch_backend.ops.paged_attention.cpu import build
from engines.torch_backend.ops.paged_attention.reference import PLAIN, Heads
from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.step import SequenceRows, StepInputs
from tests.cpu_levels import on_outermost_levels
from tests.engines.torch_backend.paged import (
    BLOCK_SIZE,
    CPU,
    check,
    make_inputs,
    make_pool,
    make_sequences,
)
from tests.factories_torch import make_text_config

pytestmark = on_outermost_levels


DECODES, MIXED = [(1, 3), (1, 64), (1, 200)], [(1, 90), (1, 2), (70, 0), (40, 55)]


@pytest.mark.parametrize(
    ("shares", "shape", "dtype", "window"),
    [
        (DECODES, (1, 16), torch.float32, 0),
        (DECODES, (2, 64), torch.bfloat16, 0),
        (MIXED, (8, 8), torch.float16, 0),
        ([(9, 0)], (1, 16), torch.bfloat16, 0),
        ([(2, 190), (100, 3)], (8, 8), torch.float32, 0),
        (DECODES, (2, 16), torch.float32, 17),
        (DECODES, (2, 16), torch.bfloat16, 64),
        (MIXED, (2, 16), torch.float32, 1),
        (MIXED, (2, 16), torch.bfloat16, 90),
    ],
    ids=str,
)
@torch.inference_mode()
def test_the_kernel_equals_the_definition(
    ops: Ops, shares: list[tuple[int, int]], shape: tuple[int, int], dtype: torch.dtype, window: int
):
    """`window` 0 also disables norms. The reference computes other forms of attention."""
    heads = make_heads(shape[1], window) if window else PLAIN
    tolerance = 16 * torch.finfo(dtype).eps
    create, inputs = ops["paged_attention"], make_inputs(shares)
    with_torch = replace(ops.site, level=replace(ops.site.level, min_fused_tokens=2))
    # torch fails on a processor with AMX that is limited to AVX2 (ATEN_CPU_CAPABILITY)
    is_limited = "amx_bf16" in cpu_flags() and not has_matrix_units()
    for each in (create,) if is_limited else (create, build(with_torch)):
        check(each, inputs, heads, (8, *shape), dtype, tolerance, rotates=True)
    if dtype is torch.float32:
        capped = Heads(softcap=0.5, sinks=torch.linspace(-1, 1, 8))
        check(create, inputs, capped, (8, *shape), dtype, tolerance, rotates=True)


def make_heads(head_dim: int, window: int | None) -> Heads:
    norms = [RMSNorm(head_dim, 1e-5).requires_grad_(False) for _ in range(2)]
    generator = torch.Generator().manual_seed(7)
    for norm in norms:
        norm.weight.copy_(torch.randn(head_dim, generator=generator))
    return Heads(*norms, window, scale=0.2)


@pytest.mark.parametrize("window", [None, 19])
@torch.inference_mode()
def test_a_token_has_the_same_result_in_any_chunk_and_batch(ops: Ops, window: int | None):
    """Results of prompts and streams are equal to the last bit."""
    heads = Heads(window=window)
    text = make_text_config(num_heads=8, num_kv_heads=2, head_dim=16)
    rotary = RotaryTable.create(text, 256, torch.float32, CPU)
    pool = make_pool(head_dim=16)
    numbers = torch.randn(64, (8 + 2 * 2) * 16)

    def attend(*sequences: SequenceRows) -> Tensor:
        inputs = StepInputs.create(sequences, BLOCK_SIZE, CPU)
        qkv = torch.cat([numbers[s.num_computed : s.num_context] for s in sequences])
        return ops["paged_attention"](8, pool, inputs, rotary.at(inputs.indices))(1, qkv, heads)

    stream, first, second = make_sequences([(1, 40), (33, 0), (21, 30)])
    all_of_them = attend(stream, first, second)

    for each in (stream, first, second):
        alone = SequenceRows(0, each.num_new, each.num_computed, each.block_ids)
        assert torch.equal(attend(alone), all_of_them[each.start : each.stop])
    for start, stop in [(30, 37), (37, 39), (39, 51)]:  # the second sequence again
        part = SequenceRows(0, stop - start, start, second.block_ids)
        assert torch.equal(attend(part), all_of_them[34 + start - 30 : 34 + stop - 30])
