"""The reference of paged attention equals the definition for any mixture of sequences and any form."""

import pytest
import torch

from engines.torch_backend.ops.paged_attention.reference import PLAIN, Heads, create_attention
from engines.torch_backend.step import BidirectionalSpan
from tests.engines.torch_backend.paged import BLOCK_SIZE, check, make_inputs, make_pool

SHARES = [
    [(1, 0)],
    [(1, 11)],
    [(1, 3), (1, 4), (1, 30)],
    [(9, 0)],
    [(8, 0), (3, 0)],
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


@pytest.mark.parametrize(
    ("num_kv_heads", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (4, torch.float16)]
)
@pytest.mark.parametrize("shares", SHARES, ids=str)
@torch.inference_mode()
def test_matches_definition(shares: list[tuple[int, int]], num_kv_heads: int, dtype: torch.dtype):
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    check(create_attention, make_inputs(shares), PLAIN, (4, num_kv_heads, 8), dtype, tolerance)


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_every_form_equals_the_definition(form: str):
    """Images begin after the computed tokens and end before their sequence does."""
    check(create_attention, make_inputs(SHARES[2]), FORMS[form])
    shares = [(1, 9), (1, 2), (8, 0), (6, 5), (2, 12)]
    check(create_attention, make_inputs(shares, IMAGES), FORMS[form])


@torch.inference_mode()
def test_a_sequence_reads_no_values_of_earlier_owners_of_its_blocks():
    """Masking alone is not enough if the other values are NaN."""
    inputs = make_inputs([(1, 4), (1, 0), (1, 30), (6, 0)])
    pool = make_pool()
    for sequence in inputs.sequences:
        block, offset = divmod(sequence.num_context, BLOCK_SIZE)
        pool.data[:, :, sequence.block_ids[block], offset:] = torch.nan
    for heads in (PLAIN, Heads(window=3), Heads(softcap=1.0)):
        out = create_attention(4, pool, inputs, None)(0, torch.randn(9, 8 * 8), heads)
        assert out.isfinite().all()
