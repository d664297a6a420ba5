"""Attention by the C++ kernel equals its plain reference implementation for every mixture of sequences in a step."""

import pytest
import torch
from torch import Tensor

from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.layers.rotary import RotaryTable, rotate
from engines.torch_backend.ops.paged_attention.reference import PLAIN, Heads
from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.step import SequenceRows, StepInputs
from tests.cpu_levels import on_outermost_levels
from tests.engines.torch_backend.paged import (
    BLOCK_SIZE,
    CPU,
    attend_by_definition,
    make_inputs,
    make_pool,
    make_sequences,
)
from tests.factories_torch import make_text_config

pytestmark = on_outermost_levels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 16), (2, 64), (8, 8)])
@pytest.mark.parametrize(
    "shares",
    [
        [(1, 0)],
        [(1, 3), (1, 64), (1, 200)],
        [(1, 9), (1, 2), (7, 0), (6, 5)],
        [(9, 0)],
        [(2, 190), (100, 3)],
    ],
    ids=str,
)
@torch.inference_mode()
def test_the_kernel_and_the_plain_twin_agree(
    ops: Ops,
    shares: list[tuple[int, int]],
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
):
    check(ops, make_inputs(shares), num_kv_heads, head_dim, dtype, PLAIN)


def check(
    ops: Ops,
    inputs: StepInputs,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    heads: Heads,
) -> None:
    text = make_text_config(num_heads=8, num_kv_heads=num_kv_heads, head_dim=head_dim)
    rotation = RotaryTable(text, 256, torch.float32, CPU).at(inputs.indices)
    torch.manual_seed(0)
    pools = [make_pool(dtype, num_kv_heads, head_dim) for _ in range(2)]
    qkv = torch.randn(len(inputs.slots), (8 + 2 * num_kv_heads) * head_dim)
    sizes = [8, num_kv_heads, num_kv_heads]
    query, key, value = qkv.view(len(qkv), -1, head_dim).split(sizes, dim=1)
    query, key = (rotate(x, *rotation) for x in heads.normed(query, key))
    expected = attend_by_definition(pools[1], inputs, query, key, value, heads)

    found = ops["paged_attention"](8, pools[0], inputs, rotation)(1, qkv.clone(), heads)

    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=16 * eps, atol=16 * eps)
    torch.testing.assert_close(pools[0].data, pools[1].data, rtol=2 * eps, atol=2 * eps)


def make_heads(head_dim: int, window: int | None) -> Heads:
    norms = [RMSNorm(head_dim, 1e-5).requires_grad_(False) for _ in range(2)]
    generator = torch.Generator().manual_seed(7)
    for norm in norms:
        norm.weight.copy_(torch.randn(head_dim, generator=generator))
    return Heads(*norms, window, scale=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 17, 64, 90])
@pytest.mark.parametrize(
    "shares", [[(1, 3), (1, 64), (1, 200)], [(1, 90), (1, 2), (70, 0), (40, 55)]], ids=str
)
@torch.inference_mode()
def test_heads_with_norms_and_windows_are_those_of_the_reference(
    ops: Ops, shares: list[tuple[int, int]], window: int | None, dtype: torch.dtype
):
    check(ops, make_inputs(shares), 2, 16, dtype, make_heads(16, window))


@torch.inference_mode()
def test_forms_that_the_kernel_does_not_compute_are_the_references(ops: Ops):
    heads = Heads(softcap=0.5, sinks=torch.linspace(-1, 1, 8))
    check(ops, make_inputs([(1, 9), (7, 5)]), 2, 16, torch.float32, heads)


@pytest.mark.parametrize("window", [None, 19])
@torch.inference_mode()
def test_a_token_has_the_same_result_in_any_chunk_and_company(ops: Ops, window: int | None):
    """To the last bit: of prompts and streams alike."""
    heads = Heads(window=window)
    text = make_text_config(num_heads=8, num_kv_heads=2, head_dim=16)
    rotary = RotaryTable(text, 256, torch.float32, CPU)
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
    for start, stop in [(30, 37), (37, 39), (39, 51)]:  # of the second one, again
        part = SequenceRows(0, stop - start, start, second.block_ids)
        assert torch.equal(attend(part), all_of_them[34 + start - 30 : 34 + stop - 30])
