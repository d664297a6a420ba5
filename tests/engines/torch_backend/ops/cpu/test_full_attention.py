"""Images' attention by the C++ kernel equals torch's, and a query's does not depend on the others."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engines.torch_backend.models.encoding_run import encode
from engines.torch_backend.models.vision import mix_values, split_heads
from engines.torch_backend.ops.cpu import tower
from engines.torch_backend.ops.cpu.full_attention import can_mix, mix_by_kernel
from engines.torch_backend.ops.cpu.kernels import CpuKernels
from engines.torch_backend.ops.cpu.library import Library
from tests.engines.torch_backend.ops.cpu.test_tower import make_model, make_pixels

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
def test_it_is_torchs(kernels: CpuKernels, sizes: tuple[int, int, int, int]):
    heads = make_heads(*sizes)

    found = mix_by_kernel(kernels.library, *heads)

    torch.testing.assert_close(found, mix_values(*heads), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_query_has_the_same_result_in_any_part_and_beside_any_image(
    kernels: CpuKernels, sizes: tuple[int, int, int, int]
):
    queries, keys, values = make_heads(*sizes)
    whole = mix_by_kernel(kernels.library, queries, keys, values)

    for start, stop in [(0, 1), (3, 12), (5, sizes[2])]:
        part = queries[-1:, :, start:stop]
        found = mix_by_kernel(kernels.library, part, keys[-1:], values[-1:])
        assert torch.equal(found, whole[-1:, start:stop])


def test_scores_far_apart_give_one_value(kernels: CpuKernels):
    """What a softmax without its largest score subtracted makes infinite."""
    heads = make_heads(1, 2, 40, 16, size=30.0)

    found = mix_by_kernel(kernels.library, *heads)

    torch.testing.assert_close(found, mix_values(*heads), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("head_dim", "dtype"), [(12, torch.float32), (16, torch.bfloat16)])
def test_what_the_kernel_does_not_read_is_left_to_torch(head_dim: int, dtype: torch.dtype):
    queries, _, _ = make_heads(1, 2, 3, head_dim)

    assert not can_mix(queries.to(dtype))


@pytest.mark.parametrize("is_right", [True, False])
@torch.inference_mode()
def test_a_tower_uses_it_where_it_was_found_right(
    kernels: CpuKernels, monkeypatch: pytest.MonkeyPatch, is_right: bool
):
    model = make_model()
    left = replace(kernels, has_full_attention=is_right)
    calls: list[int] = []

    def counted(library: Library, *heads: Tensor) -> Tensor:
        calls.append(1)
        return mix_by_kernel(library, *heads)

    monkeypatch.setattr(tower, "mix_by_kernel", counted)
    found = encode(tower.cpu_ops(model, left, torch.float32), make_pixels(model))

    assert len(calls) == (len(list(model.vision_tower.blocks)) if is_right else 0)
    assert torch.allclose(found, model.encode_images(make_pixels(model)), atol=1e-4)
