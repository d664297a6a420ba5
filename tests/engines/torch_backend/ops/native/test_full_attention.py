"""Images' attention by the C++ kernel equals torch's, and a query's does not depend on the others."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engines.torch_backend.models.vision import split_heads
from engines.torch_backend.ops.image_attention.cpu import can_mix
from engines.torch_backend.ops.image_attention.reference import mix_values
from engines.torch_backend.ops.registry import Ops
from tests.engines.torch_backend.ops.native.test_tower import make_model, make_pixels

SIZES = [  # images, heads, tokens, head width
    (1, 16, 577, 64),
    (2, 3, 17, 8),
    (1, 2, 1, 24),
    (3, 5, 50, 72),
    (1, 1, 16, 16),
    (1, 4, 257, 80),
]


def make_heads(
    num_images: int, num_heads: int, num_tokens: int, head_dim: int, size: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (num_images, num_tokens, 3 * num_heads * head_dim)
    return split_heads(size * torch.randn(shape, generator=generator), num_heads)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_torchs(ops: Ops, sizes: tuple[int, int, int, int]):
    heads = make_heads(*sizes)

    found = ops["image_attention"](*heads)

    torch.testing.assert_close(found, mix_values(*heads), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_query_has_the_same_result_in_any_part_and_beside_any_image(
    ops: Ops, sizes: tuple[int, int, int, int]
):
    queries, keys, values = make_heads(*sizes)
    whole = ops["image_attention"](queries, keys, values)

    for start, stop in [(0, 1), (3, 12), (5, sizes[2])]:
        part = queries[-1:, :, start:stop]
        found = ops["image_attention"](part, keys[-1:], values[-1:])
        assert torch.equal(found, whole[-1:, start:stop])


def test_scores_far_apart_give_one_value(ops: Ops):
    """What a softmax without its largest score subtracted makes infinite."""
    heads = make_heads(1, 2, 40, 16, size=30.0)

    found = ops["image_attention"](*heads)

    torch.testing.assert_close(found, mix_values(*heads), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("head_dim", "dtype"), [(12, torch.float32), (16, torch.bfloat16)])
def test_what_the_kernel_does_not_read_is_left_to_torch(head_dim: int, dtype: torch.dtype):
    queries, _, _ = make_heads(1, 2, 3, head_dim)

    assert not can_mix(queries.to(dtype))


@torch.inference_mode()
def test_a_tower_uses_it_where_it_was_found_right(ops: Ops):
    model, calls = make_model(), []

    def counted(*heads: Tensor) -> Tensor:
        calls.append(1)
        return ops["image_attention"](*heads)

    model.bind(replace(ops, functions={**ops.functions, "image_attention": counted}), torch.float32)
    found = model.encode_images(make_pixels(model))

    assert len(calls) == len(model.vision_tower.blocks)
    model.bind(ops.without("image_attention"), torch.float32)
    assert torch.allclose(found, model.encode_images(make_pixels(model)), atol=1e-4)
