"""Each kernel computes what its reference implementation in torch does: in Triton's interpreter, or on a GPU where there is one.

`tests/gpu/test_kernels.py` has the same on shapes of real models.
"""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.linear import INT4, INT8, empty_linear
from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.ops.add_norm.reference import add_norm
from engines.torch_backend.ops.gate.reference import gate
from engines.torch_backend.ops.paged_attention import OP as ATTENTION
from engines.torch_backend.ops.paged_attention.reference import PLAIN, Attend, Heads
from engines.torch_backend.ops.registry import Site
from engines.torch_backend.step import SequenceRows, StepInputs
from tests.factories_torch import make_text_config
from tests.long import IS_LONG, few
from tests.triton_device import DEVICE, REAL_SHAPES, import_kernels

KERNELS = SimpleNamespace(
    add_norm=import_kernels("add_norm").add_norm,
    gate=import_kernels("gate").gate,
    multiply_int8=import_kernels("linear").multiply_int8,
    multiply_int4=import_kernels("linear").multiply_int4,
)
REFERENCES = SimpleNamespace(add_norm=add_norm, gate=gate)
choose_num_parts = import_kernels("paged_attention").choose_num_parts
[create_by_kernels] = [c.build(Site(DEVICE)) for c in ATTENTION.candidates if c.name == "triton"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [32, 50])
def test_the_stream_is_added_to_and_normalised(width: int, dtype: torch.dtype):
    x, delta = numbers(3, width, dtype=dtype), numbers(3, width, dtype=dtype).flip(0)
    gain = numbers(width, dtype=dtype)
    for addend in (None, delta):
        found = KERNELS.add_norm(x, addend, gain, 1e-5)
        assert_close(found, REFERENCES.add_norm(x, addend, gain, 1e-5), **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_half_gates_the_other(dtype: torch.dtype):
    x = 5 * numbers(3, 2 * 1100, dtype=dtype)
    assert_close(KERNELS.gate(x), REFERENCES.gate(x), **TOLERANCES[dtype])


def make_decodes(lengths: list[int], num_blocks: int = 40) -> StepInputs:
    """One new token of each; last blocks are those of others, as shared prefixes are."""
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
    few(
        product(("plain", "norms", "still"), DTYPES, ((), (4, 5, 3))),
        [
            ("plain", torch.float32, ()),
            ("plain", torch.float16, (4, 5, 3)),
            ("norms", torch.float32, (4, 5, 3)),
            ("norms", torch.bfloat16, ()),
            ("still", torch.bfloat16, (4, 5, 3)),
        ],
    ),
    ids=str,
)
def test_heads_are_rotated_and_written(dtype: torch.dtype, sections: tuple[int, ...], form: str):
    norms = [RMSNorm(24, 1e-5).requires_grad_(False).to(DEVICE, dtype) for _ in range(2)]
    for norm, shift in zip(norms, (0.0, 0.5), strict=True):
        norm.weight.copy_(numbers(24, dtype=dtype) + shift)
    heads = {"plain": PLAIN, "norms": Heads(*norms), "still": Heads(rotates=False)}[form]
    config = make_text_config(head_dim=24, rope_sections=sections)
    rotary = RotaryTable(config, 40, dtype, DEVICE)
    positions = torch.tensor([0, 39, 17], device=DEVICE)
    if sections:
        positions = torch.tensor([[0, 39, 17], [7, 2, 38], [3, 11, 0]], device=DEVICE)
    inputs = make_decodes([1, 40, 18], 16)
    pools = [make_pool(2, 24, dtype) for _ in range(2)]
    qkv = numbers(3, (4 + 2 * 2) * 24, dtype=dtype)
    found = [each(1, qkv, heads) for each in make_both(4, pools, inputs, rotary.at(positions))]
    assert_close(*found, **TOLERANCES[dtype])
    slots = torch.arange(16 * 8, device=DEVICE)[None]
    for layer in range(2):  # the other layer, and all other slots, are as they were
        assert_close(pools[0].read(layer, slots), pools[1].read(layer, slots), **TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("heads", "dtype", "windows"),
    [
        ((2, 2, 16), torch.float32, (None, 1, 70)),
        ((2, 2, 24), torch.bfloat16, (70,)),
        ((6, 2, 8), torch.float32, (None,)),
        ((4, 1, 24), torch.float16, (1,)),
        ((4, 1, 16), torch.bfloat16, (70,)),
        ((2, 1, 256), torch.float32, (None,)),
    ],
    ids=str,
)
def test_new_tokens_attend_to_their_pages(
    heads: tuple[int, int, int], dtype: torch.dtype, windows: tuple[int | None, ...]
):
    num_heads, num_kv_heads, head_dim = heads
    pools = [make_pool(num_kv_heads, head_dim, dtype, num_blocks=40) for _ in range(2)]
    inputs = make_decodes([3, 150, 64, 9])  # one tile, several, a whole one
    qkv = numbers(4, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    for window in (None, 1, 70) if IS_LONG else windows:
        both = make_both(num_heads, pools, inputs, None)
        assert_close(*(each(1, qkv, Heads(window=window)) for each in both), **TOLERANCES[dtype])


def test_nothing_beyond_a_context_is_looked_at():
    pools = [make_pool(2, 8, torch.float32) for _ in range(2)]
    inputs = StepInputs.create([SequenceRows(0, 1, 10, [*range(16)])], 8, DEVICE)
    qkv = numbers(1, 8 * 8)
    expected = ATTENTION.reference(4, pools[0], inputs, None)(0, qkv)
    for pool in pools:
        for stored in pool.blocks(0):
            stored.flatten(0, 1)[11:] = torch.nan
    for attend in make_both(4, pools, inputs, None):
        assert_close(attend(0, qkv), expected)


def test_a_row_without_a_context_gives_zeros():
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


@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    [(1, torch.float32), (1, torch.bfloat16), (5, torch.float16), (17, torch.float32)],
    ids=str,
)
def test_few_rows_are_multiplied_by_few_bits(num_rows: int, dtype: torch.dtype):
    x = numbers(num_rows, 320, dtype=dtype)
    check_few_bits(8, x, 40)
    for num_groups in (5, 10):
        check_few_bits(4, x, 40, num_groups)


def check_few_bits(bits: int, x: torch.Tensor, num_outputs: int, num_groups: int = 1) -> None:
    """Sums of products are rounded once: their error is a share of the largest."""
    width, dtype = x.shape[1], x.dtype
    layer = empty_linear(width, num_outputs)
    generator = torch.Generator().manual_seed(1)
    if bits == 8:
        integers = torch.randint(
            -127, 128, (num_outputs, width), generator=generator, dtype=torch.int8
        ).to(DEVICE)
        scale = numbers(num_outputs, dtype=dtype).abs() / 127
        layer.hold(INT8, {"integers": integers, "scale": scale.float()})
        found = KERNELS.multiply_int8(x, integers, scale)
    else:
        shape = (num_outputs, width // 2)
        pairs = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).to(DEVICE)
        scale_zero = numbers(num_groups, num_outputs, 2, dtype=dtype) / 8
        tensors = {"pairs": pairs, "scale_zero": scale_zero.float()}
        layer.hold(INT4, tensors, width // num_groups)
        found = KERNELS.multiply_int4(x, pairs, scale_zero)
    expected = layer(x.float())
    bound = 8 * torch.finfo(dtype).eps * expected.abs().max().item() + 1e-5
    assert_close(found.float(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("shape", REAL_SHAPES)
def test_shapes_of_real_models(shape: str):
    """One token of each kernel, with heads, widths and positions as they are there, a norm of heads and a window."""
    text = make_text_config(max_position_embeddings=128, **REAL_SHAPES[shape])
    dtype = torch.bfloat16
    tolerance = TOLERANCES[dtype]
    width, inner, head_dim = text.hidden_size, text.intermediate_size, text.head_dim
    x, gain = numbers(1, width, dtype=dtype), numbers(width, dtype=dtype)
    assert_close(
        KERNELS.add_norm(x, x, gain, 1e-5), REFERENCES.add_norm(x, x, gain, 1e-5), **tolerance
    )
    gated = numbers(1, 2 * inner, dtype=dtype)
    assert_close(KERNELS.gate(gated), REFERENCES.gate(gated), **tolerance)
    pools = [make_pool(text.num_kv_heads, head_dim, dtype, 5) for _ in range(2)]
    norms = [RMSNorm(head_dim, 1e-6).requires_grad_(False).to(DEVICE, dtype) for _ in range(2)]
    qkv = numbers(1, (text.num_heads + 2 * text.num_kv_heads) * head_dim, dtype=dtype)
    positions = torch.tensor([37], device=DEVICE)
    if text.rope_sections:
        positions = torch.tensor([[37], [3], [5]], device=DEVICE)
    rotary = RotaryTable(text, 40, dtype, DEVICE)
    inputs = StepInputs.create([SequenceRows(0, 1, 37, [*range(5)])], 8, DEVICE)
    both = make_both(text.num_heads, pools, inputs, rotary.at(positions))
    assert_close(*(attend(0, qkv, Heads(*norms, window=30)) for attend in both), **tolerance)


@pytest.mark.parametrize(
    ("shape", "bits"),
    few(
        product(REAL_SHAPES, (4, 8)),
        [(name, 4 + 4 * (n % 2)) for n, name in enumerate(REAL_SHAPES)],
    ),
)
def test_few_bits_of_real_widths(shape: str, bits: int):
    """A row of a layer's inputs, by more outputs than a program has."""
    sizes = ("hidden_size", "intermediate_size") if bits == 8 else ("hidden_size",)
    for width in (REAL_SHAPES[shape][size] for size in sizes):
        check_few_bits(bits, numbers(1, width, dtype=torch.bfloat16), 18, width // 64)
