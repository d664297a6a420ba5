"""Each Triton kernel equals its torch reference, in Triton's interpreter, or on a GPU if there is one.

`tests/gpu/test_cuda.py` tests the shapes of real models.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.ops.paged_attention import OP as ATTENTION
from engines.torch_backend.ops.paged_attention.reference import PLAIN, Attend, Heads
from engines.torch_backend.ops.registry import Site
from engines.torch_backend.step import SequenceRows, StepInputs
from tests.engines.torch_backend.paged import in_sections
from tests.factories_torch import make_text_config
from tests.triton_device import DEVICE, import_kernels

choose_num_parts = import_kernels("paged_attention").choose_num_parts
[create_by_kernels] = [c.build(Site(DEVICE)) for c in ATTENTION.candidates if c.name == "triton"]
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE, dtype)


def make_pool(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, num_blocks: int = 16
) -> KVCachePool:
    config = make_text_config(num_kv_heads=num_kv_heads, head_dim=head_dim, num_layers=2)
    pool = KVCachePool(config, num_blocks, 8, dtype, DEVICE)
    slots = torch.arange(num_blocks * 8, device=DEVICE)
    for layer in range(2):
        shape = (num_blocks * 8, num_kv_heads, head_dim)
        pool.write(layer, slots, numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype).flip(0))
    return pool


def make_decodes(lengths: list[int], num_blocks: int = 40) -> StepInputs:
    """Returns one new token per sequence; later blocks are shared between sequences, as prefixes are."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3))
    tables = [order.roll(7 * row)[:20].tolist() for row in range(len(lengths))]
    sequences = [SequenceRows(i, 1, n - 1, tables[i]) for i, n in enumerate(lengths)]
    return StepInputs.create(sequences, 8, DEVICE)


def make_both(
    num_heads: int, pools: list[KVCachePool], inputs: StepInputs, rotation: Any
) -> list[Attend]:
    return [
        create(num_heads, pool, inputs, rotation)
        for create, pool in zip((create_by_kernels, ATTENTION.reference), pools, strict=True)
    ]


@pytest.mark.parametrize(
    ("form", "dtype", "sections"),
    [
        ("plain", torch.float16, (4, 5, 3)),
        ("norms", torch.float32, (4, 5, 3)),
        ("norms", torch.bfloat16, ()),
        ("still", torch.float32, (4, 5, 3)),
    ],
    ids=str,
)
def test_heads_are_rotated_and_written(dtype: torch.dtype, sections: tuple[int, ...], form: str):
    norms = [RMSNorm(24, 1e-5).requires_grad_(False).to(DEVICE, dtype) for _ in range(2)]
    for norm, shift in zip(norms, (0.0, 0.5), strict=True):
        norm.weight.copy_(numbers(24, dtype=dtype) + shift)
    heads = {"plain": PLAIN, "norms": Heads(*norms), "still": Heads(rotates=False)}[form]
    rotary = RotaryTable.create(make_text_config(head_dim=24), 40, dtype, DEVICE)
    positions = torch.tensor([0, 39, 17], device=DEVICE)
    if sections:
        rotary = in_sections(rotary, sections)
        positions = torch.tensor([[0, 39, 17], [7, 2, 38], [3, 11, 0]], device=DEVICE)
    inputs = make_decodes([1, 40, 18], 16)
    pools = [make_pool(2, 24, dtype) for _ in range(2)]
    qkv = numbers(3, (4 + 2 * 2) * 24, dtype=dtype)
    found = [each(1, qkv, heads) for each in make_both(4, pools, inputs, rotary.at(positions))]
    assert_close(*found, **TOLERANCES[dtype])
    slots = torch.arange(16 * 8, device=DEVICE)[None]
    for layer in range(2):  # the other layer and all other slots are unchanged
        assert_close(pools[0].read(layer, slots), pools[1].read(layer, slots), **TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("heads", "dtype", "window"),
    [
        ((2, 2, 16), torch.float32, None),
        ((2, 2, 24), torch.bfloat16, 70),
        ((6, 2, 8), torch.float32, 1),
        ((4, 1, 24), torch.float16, 70),
        ((2, 1, 256), torch.float32, None),
    ],
    ids=str,
)
def test_new_tokens_attend_to_their_pages(
    heads: tuple[int, int, int], dtype: torch.dtype, window: int | None
):
    num_heads, num_kv_heads, head_dim = heads
    pools = [make_pool(num_kv_heads, head_dim, dtype, num_blocks=40) for _ in range(2)]
    inputs = make_decodes([3, 150, 64, 9])  # one tile, several, exactly one
    qkv = numbers(4, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    both = make_both(num_heads, pools, inputs, None)
    assert_close(*(each(1, qkv, Heads(window=window)) for each in both), **TOLERANCES[dtype])


def test_only_the_context_is_read_and_a_row_without_one_is_zero():
    pools = [make_pool(2, 8, torch.float32) for _ in range(2)]
    inputs = StepInputs.create([SequenceRows(0, 1, 10, [*range(16)])], 8, DEVICE)
    qkv = numbers(1, 8 * 8)
    expected = ATTENTION.reference(4, pools[0], inputs, None)(0, qkv)
    for pool in pools:
        for stored in pool.blocks(0):
            stored.flatten(0, 1)[11:] = torch.nan
    for attend in make_both(4, pools, inputs, None):
        assert_close(attend(0, qkv), expected)
    pool = make_pool(2, 8, torch.float32)
    inputs = replace(make_decodes([3, 9], 16), lengths=torch.tensor([3, 0], device=DEVICE))
    assert not create_by_kernels(4, pool, inputs, None)(0, numbers(2, 8 * 8))[1].any()


@pytest.mark.parametrize(
    ("num_rows", "max_context", "num_parts"),
    [(32, 4096, 16), (32, 640, 8), (32, 64, 1), (2048, 4096, 1), (1, 1 << 20, 32)],
)
def test_contexts_are_split_until_the_device_is_full(
    num_rows: int, max_context: int, num_parts: int
):
    assert choose_num_parts(num_rows, max_context) == num_parts
