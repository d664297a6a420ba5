"""Paged attention equals its plain reference implementation for every mixture of sequences in a step."""

import pytest
import torch
from torch.testing import assert_close

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import (
    Span,
    paged_attention,
    paged_attention_by_sequence,
    plan_attention,
)
from tests.factories_torch import BLOCK_SIZE, make_spans, make_text_config

CPU = torch.device("cpu")


def make_pool(dtype: torch.dtype = torch.float32, num_kv_heads: int = 2) -> KVCachePool:
    pool = KVCachePool(make_text_config(num_kv_heads=num_kv_heads), 128, BLOCK_SIZE, dtype, CPU)
    torch.manual_seed(0)
    pool.data.normal_()
    return pool


def attend_both_ways(
    shares: list[tuple[int, int]], dtype: torch.dtype = torch.float32, num_kv_heads: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = plan_attention(make_spans(shares), BLOCK_SIZE, dtype, CPU)
    num_tokens = sum(num_new for num_new, _ in shares)
    torch.manual_seed(1)
    query = torch.randn(num_tokens, 4, 8, dtype=dtype)
    key = torch.randn(num_tokens, num_kv_heads, 8, dtype=dtype)
    value = torch.randn(num_tokens, num_kv_heads, 8, dtype=dtype)
    pools = make_pool(dtype, num_kv_heads), make_pool(dtype, num_kv_heads)
    fast = paged_attention(pools[0], plan, 1, query, key, value)
    slow = paged_attention_by_sequence(pools[1], plan, 1, query, key, value)
    assert_close(pools[0].data, pools[1].data)
    return fast, slow


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "shares",
    [
        [(1, 0)],
        [(1, 11)],
        [(1, 7), (1, 7)],
        [(1, 3), (1, 4), (1, 30)],
        [(9, 0)],
        [(8, 0), (3, 0)],
        [(5, 6)],
        [(4, 8), (2, 1)],
        [(1, 9), (1, 2), (7, 0), (6, 5), (2, 12)],
    ],
    ids=str,
)
@torch.inference_mode()
def test_fast_and_plain_attention_agree(shares, num_kv_heads):
    fast, slow = attend_both_ways(shares, num_kv_heads=num_kv_heads)
    assert_close(fast, slow)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_they_agree_in_half_precision(dtype):
    fast, slow = attend_both_ways([(1, 9), (1, 2), (7, 0), (6, 5)], dtype)
    assert_close(fast, slow, rtol=2e-2, atol=2e-2)


@torch.inference_mode()
def test_new_tokens_land_in_the_slots_of_their_blocks():
    pool = make_pool()
    span = Span(start=0, num_new=3, num_computed=3, block_ids=[9, 40])
    plan = plan_attention([span], BLOCK_SIZE, torch.float32, CPU)
    key = torch.randn(3, 2, 8)
    paged_attention(pool, plan, 0, torch.randn(3, 4, 8), key, key)
    keys, _ = pool.read(0, torch.tensor([9, 40]))
    assert_close(keys[3:6], key)


@torch.inference_mode()
def test_a_sequence_reads_nothing_of_what_others_left_in_its_blocks():
    """What an earlier owner left behind is masked; if it is not a number, masking alone is not enough."""
    spans = make_spans([(1, 4), (1, 0), (1, 30), (6, 0)])
    plan = plan_attention(spans, BLOCK_SIZE, torch.float32, CPU)
    pool = make_pool()
    dirty = torch.tensor([span.block_ids[-1] for span in spans if span.num_context % BLOCK_SIZE])
    begun = torch.tensor([spans[0].block_ids[1], spans[1].block_ids[0], spans[3].block_ids[1]])
    assert plan.fresh_blocks is not None
    assert plan.fresh_blocks.tolist() == begun.tolist()
    assert set(begun.tolist()) <= set(dirty.tolist())
    pool.data[:, :, begun] = torch.nan
    pool.clear(plan.fresh_blocks)
    key = torch.randn(9, 2, 8)
    out = paged_attention(pool, plan, 0, torch.randn(9, 4, 8), key, key)
    assert out.isfinite().all()
