"""The reference of paged attention is the definition, for every mixture of sequences and every form."""

import pytest
import torch
from torch.testing import assert_close

from engines.torch_backend.ops.paged_attention.reference import PLAIN, Heads, create_attention
from engines.torch_backend.step import BidirectionalSpan, SequenceRows, StepInputs
from tests.engines.torch_backend.paged import (
    BLOCK_SIZE,
    CPU,
    attend_by_definition,
    make_inputs,
    make_pool,
)

SHARES = [
    [(1, 0)],
    [(1, 11)],
    [(1, 7), (1, 7)],
    [(1, 3), (1, 4), (1, 30)],
    [(9, 0)],
    [(8, 0), (3, 0)],
    [(5, 6)],
    [(4, 8), (2, 1)],
    [(1, 9), (1, 2), (7, 0), (6, 5), (2, 12)],
]
FORMS = {
    "window": Heads(window=3),
    "wide window": Heads(window=10),
    "chunk": Heads(chunk=5),
    "soft cap": Heads(softcap=0.7, scale=0.9),
    "sinks": Heads(sinks=torch.linspace(-2, 2, 4), window=6),
    "images": Heads(is_bidirectional=True, window=4),
    "plain layers of a model with images": Heads(window=4),
}
IMAGES = [BidirectionalSpan(3, 8, 5), BidirectionalSpan(10, 13, 8, ignores_window=True)]


def check(
    inputs: StepInputs,
    heads: Heads = PLAIN,
    num_kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
) -> None:
    qkv = torch.randn(len(inputs.slots), (4 + 2 * num_kv_heads) * 8).to(dtype)
    query, key, value = qkv.view(len(qkv), -1, 8).split([4, num_kv_heads, num_kv_heads], dim=1)
    pools = [make_pool(dtype, num_kv_heads) for _ in range(2)]
    found = create_attention(4, pools[0], inputs, None)(1, qkv, heads)
    expected = attend_by_definition(pools[1], inputs, query, key, value, heads)
    assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    assert_close(pools[0].data, pools[1].data)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("shares", SHARES, ids=str)
@torch.inference_mode()
def test_it_is_the_definition(shares: list[tuple[int, int]], num_kv_heads: int):
    check(make_inputs(shares), num_kv_heads=num_kv_heads)


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_every_form_is_the_definition(form: str):
    """Images begin behind what is computed, and end before their sequence does."""
    for shares in (SHARES[3], [(1, 9), (1, 2), (8, 0), (6, 5), (2, 12)]):
        has_images = len(shares) > 3
        check(make_inputs(shares, IMAGES if has_images else []), FORMS[form])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_it_is_so_in_half_precision(dtype: torch.dtype):
    check(make_inputs(SHARES[-1]), dtype=dtype, tolerance=2e-2)


@torch.inference_mode()
def test_new_tokens_land_in_the_slots_of_their_blocks():
    pool = make_pool()
    inputs = StepInputs.create([SequenceRows(0, 3, 3, [9, 40])], BLOCK_SIZE, CPU)
    qkv = torch.randn(3, 8 * 8)
    create_attention(4, pool, inputs, None)(0, qkv)
    keys, values = pool.read(0, torch.tensor([[9 * 4 + 3, 40 * 4, 40 * 4 + 1]]))
    assert_close(torch.cat([keys, values], dim=2)[0], qkv.view(3, 8, 8)[:, 4:])


@torch.inference_mode()
def test_a_sequence_reads_nothing_of_what_others_left_in_its_blocks():
    """Masking alone is not enough where that is not a number."""
    inputs = make_inputs([(1, 4), (1, 0), (1, 30), (6, 0)])
    pool = make_pool()
    for sequence in inputs.sequences:
        block, offset = divmod(sequence.num_context, BLOCK_SIZE)
        pool.data[:, :, sequence.block_ids[block], offset:] = torch.nan
    for heads in (PLAIN, Heads(window=3), Heads(softcap=1.0)):
        out = create_attention(4, pool, inputs, None)(0, torch.randn(9, 8 * 8), heads)
        assert out.isfinite().all()
