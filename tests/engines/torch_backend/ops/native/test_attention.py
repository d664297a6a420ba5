"""Attention by the C++ kernel equals its plain reference implementation for every mixture of sequences in a step."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import (
    AttentionPlan,
    Heads,
    Span,
    paged_attention_by_sequence,
    plan_attention,
)
from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.layers.rotary import RotaryTable, rotate
from engines.torch_backend.ops.registry import Ops
from tests.factories_torch import BLOCK_SIZE, make_spans, make_text_config

CPU = torch.device("cpu")


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
    text = make_text_config(num_heads=8, num_kv_heads=num_kv_heads, head_dim=head_dim)
    plan = plan_attention(make_spans(shares), BLOCK_SIZE, dtype, CPU)
    positions = torch.cat([torch.arange(s.num_computed, s.num_context) for s in plan.spans])
    rotation = RotaryTable(text, 256, torch.float32, CPU).at(positions)
    torch.manual_seed(0)
    pools = [KVCachePool(text, 128, BLOCK_SIZE, dtype, CPU) for _ in range(2)]
    pools[0].data.normal_()
    pools[1].data.copy_(pools[0].data)
    qkv = torch.randn(len(positions), (8 + 2 * num_kv_heads) * head_dim)
    sizes = [8, num_kv_heads, num_kv_heads]
    query, key, value = qkv.view(len(qkv), -1, head_dim).split(sizes, dim=1)
    expected = paged_attention_by_sequence(
        pools[1],
        plan,
        1,
        rotate(query, *rotation),
        rotate(key, *rotation).to(dtype),
        value.to(dtype),
    )

    found = ops["step_attention"](text, pools[0], plan, rotation)(1, qkv.clone())

    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=8 * eps, atol=8 * eps)
    torch.testing.assert_close(pools[0].data, pools[1].data, rtol=2 * eps, atol=eps)


def make_heads(head_dim: int, window: int | None) -> Heads:
    norms = [RMSNorm(head_dim, 1e-5).requires_grad_(False) for _ in range(2)]
    generator = torch.Generator().manual_seed(7)
    for norm in norms:
        norm.weight.copy_(torch.randn(head_dim, generator=generator))
    return Heads(*norms, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 17, 64, 90])
@pytest.mark.parametrize(
    "shares", [[(1, 3), (1, 64), (1, 200)], [(1, 90), (1, 2), (70, 0), (40, 55)]], ids=str
)
@torch.inference_mode()
def test_heads_with_norms_and_windows_are_those_of_the_reference(
    ops: Ops, shares: list[tuple[int, int]], window: int | None, dtype: torch.dtype
):
    text = make_text_config(num_heads=8, num_kv_heads=2, head_dim=16)
    plan = plan_attention(make_spans(shares), BLOCK_SIZE, dtype, CPU)
    positions = torch.cat([torch.arange(s.num_computed, s.num_context) for s in plan.spans])
    rotation = RotaryTable(text, 256, torch.float32, CPU).at(positions)
    torch.manual_seed(0)
    pools = [KVCachePool(text, 128, BLOCK_SIZE, dtype, CPU) for _ in range(2)]
    pools[0].data.normal_()
    pools[1].data.copy_(pools[0].data)
    heads, qkv = make_heads(16, window), torch.randn(len(positions), (8 + 2 * 2) * 16)
    query, key, value = qkv.view(len(qkv), -1, 16).split([8, 2, 2], dim=1)
    query, key = (
        torch.nn.functional.rms_norm(x, (16,), norm.weight, 1e-5)
        for x, norm in ((query, heads.query_norm), (key, heads.key_norm))
        if norm is not None
    )
    expected = _attend_by_definition(
        pools[1], plan, window or 1000, rotate(query, *rotation), rotate(key, *rotation), value
    )

    found = ops["step_attention"](text, pools[0], plan, rotation)(1, qkv.clone(), heads)

    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=16 * eps, atol=16 * eps)
    torch.testing.assert_close(pools[0].data, pools[1].data, rtol=2 * eps, atol=2 * eps)


def _attend_by_definition(
    pool: KVCachePool, plan: AttentionPlan, window: int, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Token by token. Shapes: query (N, H, D), key and value (N, K, D); returns (N, H * D)."""
    pool.write(1, plan.slots, key.to(pool.data.dtype), value.to(pool.data.dtype))
    rows = []
    for span in plan.spans:
        keys, values = (x.float() for x in pool.read(1, torch.tensor(span.block_ids)))
        for token in range(span.num_new):
            stop = span.num_computed + token + 1
            seen = slice(max(0, stop - window), stop)
            group = query.shape[1] // keys.shape[1]
            near, far = (x[seen].repeat_interleave(group, dim=1) for x in (keys, values))
            scores = torch.einsum("hd,thd->ht", query[span.start + token], near)
            weights = (scores / query.shape[2] ** 0.5).softmax(-1)
            rows.append(torch.einsum("ht,thd->hd", weights, far).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 19])
@torch.inference_mode()
def test_a_token_has_the_same_result_in_any_chunk_and_company(ops: Ops, window: int | None):
    """To the last bit: of prompts and streams alike."""
    heads = Heads(window=window)
    text = make_text_config(num_heads=8, num_kv_heads=2, head_dim=16)
    rotary = RotaryTable(text, 256, torch.float32, CPU)
    pool = KVCachePool(text, 128, BLOCK_SIZE, torch.float32, CPU)
    torch.manual_seed(0)
    pool.data.normal_()
    numbers = torch.randn(64, (8 + 2 * 2) * 16)

    def attend(spans: list[Span]) -> Tensor:
        positions = torch.cat([torch.arange(s.num_computed, s.num_context) for s in spans])
        plan = plan_attention(spans, BLOCK_SIZE, torch.float32, CPU)
        qkv = torch.cat([numbers[s.num_computed : s.num_context] for s in spans])
        return ops["step_attention"](text, pool, plan, rotary.at(positions))(1, qkv, heads)

    stream, first, second = make_spans([(1, 40), (33, 0), (21, 30)])
    all_of_them = attend([stream, first, second])

    assert torch.equal(attend([replace(stream, start=0)]), all_of_them[:1])
    assert torch.equal(attend([replace(first, start=0)]), all_of_them[1:34])
    assert torch.equal(attend([replace(second, start=0)]), all_of_them[34:])
    for start, stop in [(30, 37), (37, 39), (39, 51)]:  # of the second one, again
        part = Span(0, stop - start, start, second.block_ids)
        assert torch.equal(attend([part]), all_of_them[34 + start - 30 : 34 + stop - 30])
