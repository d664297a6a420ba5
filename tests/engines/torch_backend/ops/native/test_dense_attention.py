"""Dense attention by the C++ kernel equals torch's, and a query's does not depend on the others."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from engines.torch_backend.ops.dense_attention.cpu import reads
from engines.torch_backend.ops.dense_attention.reference import attend
from engines.torch_backend.ops.registry import Ops, choose
from tests.cpu_levels import on_outermost_levels
from tests.engines.torch_backend.ops.native.test_tower import make_model, make_pixels

pytestmark = on_outermost_levels

SIZES = [(12, 32), (3, 8), (2, 64), (1, 24), (5, 72)]  # heads, head width
TEXTS = (1, 2, 2, 7, 16, 17, 17, 40, 130)
IMAGES = (257, 257)


def make_heads(
    lengths: tuple[int, ...],
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
) -> tuple[Tensor, ...]:
    """Queries, keys and values side by side in memory."""
    generator = torch.Generator().manual_seed(0)
    shape = (sum(lengths), 3, num_heads, head_dim)
    return (size * torch.randn(shape, generator=generator)).to(dtype).unbind(1)


def squares(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(length, length) for length in lengths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [TEXTS, IMAGES], ids=["texts", "images"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_torchs(
    ops: Ops, sizes: tuple[int, int], lengths: tuple[int, ...], dtype: torch.dtype
):
    heads = make_heads(lengths, *sizes, dtype)

    found = ops["dense_attention"](*heads, squares(lengths))

    assert reads(heads[0])
    expected = attend(*(x.float() for x in heads), squares(lengths))
    tolerance = 1e-5 if dtype is torch.float32 else 2**-8
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 24])
def test_a_query_has_the_same_result_in_any_part_and_beside_any_sequence(
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


def test_scores_far_apart_give_one_value(ops: Ops):
    """What a softmax without its largest score subtracted makes infinite."""
    heads = make_heads((5, 9), 2, 16, size=30.0)

    found = ops["dense_attention"](*heads, squares((5, 9)))

    torch.testing.assert_close(found, attend(*heads, squares((5, 9))), rtol=1e-4, atol=1e-4)


def test_numbers_that_it_does_not_read_are_torchs(ops: Ops):
    for head_dim, dtype in ((12, torch.float32), (16, torch.float16)):
        heads = make_heads((3, 4), 2, head_dim, dtype)
        assert not reads(heads[0])
        expected = attend(*heads, squares((3, 4)))
        assert torch.equal(ops["dense_attention"](*heads, squares((3, 4))), expected)


@torch.inference_mode()
def test_a_tower_uses_it_where_it_was_found_right(ops: Ops):
    model, calls = make_model(), []

    def counted(*given: Tensor) -> Tensor:
        calls.append(1)
        return ops["dense_attention"](*given)

    model.bind(replace(ops, functions={**ops.functions, "dense_attention": counted}), torch.float32)
    found = model.encode_images(make_pixels(model))

    assert len(calls) == len(model.vision_tower.blocks)
    model.bind(choose(ops.site, {"dense_attention"}), torch.float32)
    assert torch.allclose(found, model.encode_images(make_pixels(model)), atol=1e-4)
