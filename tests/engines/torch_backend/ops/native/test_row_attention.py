"""Attention of packed rows by the C++ kernel equals torch's, and a row's does not depend on the others."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.ops.row_attention.cpu import can_attend
from engines.torch_backend.ops.row_attention.reference import attend_rows

SIZES = [(12, 32), (3, 8), (2, 64), (1, 24)]  # heads, head width
LENGTHS = (1, 2, 2, 7, 16, 17, 17, 40, 130)


def joined(
    lengths: tuple[int, ...], num_heads: int, head_dim: int, dtype: torch.dtype, size: float = 1.0
) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (sum(lengths), 3, num_heads, head_dim)
    return (size * torch.randn(shape, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_torchs(ops: Ops, sizes: tuple[int, int], dtype: torch.dtype):
    rows = joined(LENGTHS, *sizes, dtype)

    found = ops["row_attention"](rows, LENGTHS)

    assert can_attend(rows)
    expected = attend_rows(rows.float(), LENGTHS)
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_result_alone(ops: Ops, dtype: torch.dtype):
    rows = joined(LENGTHS, 3, 16, dtype)
    whole = ops["row_attention"](rows, LENGTHS)

    for length, end in zip(LENGTHS, accumulate(LENGTHS), strict=True):
        part = slice(end - length, end)
        assert torch.equal(ops["row_attention"](rows[part], (length,)), whole[part])


def test_scores_far_apart_give_one_value(ops: Ops):
    """What a softmax without its largest score subtracted makes infinite."""
    rows = joined((5, 9), 2, 16, torch.float32, size=30.0)

    found = ops["row_attention"](rows, (5, 9))

    torch.testing.assert_close(found, attend_rows(rows, (5, 9)), rtol=1e-4, atol=1e-4)


def test_numbers_that_it_does_not_read_are_torchs(ops: Ops):
    for rows in (joined((3, 4), 2, 12, torch.float32), joined((3, 4), 2, 16, torch.float16)):
        assert not can_attend(rows)
        assert torch.equal(ops["row_attention"](rows, (3, 4)), attend_rows(rows, (3, 4)))
