"""The C++ kernel for dense attention equals torch, and the result of a query does not depend on others."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from engines.torch_backend.ops.dense_attention.cpu import reads
from engines.torch_backend.ops.dense_attention.reference import attend
from engines.torch_backend.ops.registry import Ops
from tests.cpu_levels import on_outermost_levels

pytestmark = on_outermost_levels

TEXTS = (1, 2, 2, 7, 16, 17, 17, 40, 130)


def make_heads(
    lengths: tuple[int, ...],
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
) -> tuple[Tensor, ...]:
    """Returns queries, keys and values as views of one tensor."""
    generator = torch.Generator().manual_seed(0)
    shape = (sum(lengths), 3, num_heads, head_dim)
    return (size * torch.randn(shape, generator=generator)).to(dtype).unbind(1)


def squares(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(length, length) for length in lengths]


@pytest.mark.parametrize(
    ("heads", "lengths", "dtype"),
    [
        ((12, 32), TEXTS, torch.float32),
        ((3, 8), TEXTS, torch.bfloat16),
        ((2, 64), (257, 257), torch.float32),
        ((1, 24), TEXTS, torch.float32),
        ((5, 72), (257, 257), torch.bfloat16),
    ],
    ids=str,
)
def test_the_kernel_equals_torch(
    ops: Ops, heads: tuple[int, int], lengths: tuple[int, ...], dtype: torch.dtype
):
    """Includes scores so far apart that a softmax overflows unless it subtracts the maximum."""
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    for size, most in ((1.0, tolerance), (30.0, 10 * tolerance)):
        inputs = make_heads(lengths, *heads, dtype, size)
        assert reads(inputs[0])
        found = ops["dense_attention"](*inputs, squares(lengths))
        expected = attend(*(x.float() for x in inputs), squares(lengths))
        assert (found.float() - expected).abs().max() <= most * (1 + expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 24])
def test_a_query_has_the_same_result_in_any_part_and_batch(
    ops: Ops, head_dim: int, dtype: torch.dtype
):
    query, key, value = make_heads(TEXTS, 3, head_dim, dtype)
    whole = ops["dense_attention"](query, key, value, squares(TEXTS))

    for length, end in zip(TEXTS, accumulate(TEXTS), strict=True):
        own = slice(end - length, end)
        for start, stop in {(0, length), (length // 3, length)}:
            part = query[own][start:stop]
            lengths = [(stop - start, length)]
            found = ops["dense_attention"](part, key[own], value[own], lengths)
            assert torch.equal(found, whole[own][start:stop])


def test_unsupported_dtypes_and_widths_are_computed_by_torch(ops: Ops):
    for head_dim, dtype in ((12, torch.float32), (16, torch.float16)):
        heads = make_heads((3, 4), 2, head_dim, dtype)
        assert not reads(heads[0])
        expected = attend(*heads, squares((3, 4)))
        assert torch.equal(ops["dense_attention"](*heads, squares((3, 4))), expected)
