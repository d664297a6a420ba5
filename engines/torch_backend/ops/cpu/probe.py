"""Small examples that a kernel must compute as its reference implementation does, before any model trusts it.

Compilers and processors differ from those that the tests have seen. Knows no models.

Shape letters: M tokens, K inputs, N outputs.
"""

import torch
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import Span, paged_attention_by_sequence, plan_attention
from engines.torch_backend.layers.rotary import RotaryTable, rotate
from engines.torch_backend.models.config import TextConfig
from engines.torch_backend.models.vision import mix_values, split_heads
from engines.torch_backend.ops.cpu.attention import PagedAttention
from engines.torch_backend.ops.cpu.full_attention import mix_by_kernel
from engines.torch_backend.ops.cpu.layers import LayerChain, LayerProducts
from engines.torch_backend.ops.cpu.library import (
    FLOAT_KINDS,
    Before,
    Kind,
    Library,
    Product,
    Weights,
)
from engines.torch_backend.ops.cpu.packing import INT8_GROUP, pack_int4, pack_int8

_NUM_OUTPUTS, _NUM_INPUTS, _GROUP = 50, 192, 64
_NUM_TOKENS = (1, 3, 6, 9)  # every form of a kernel
#: of the result's size: what rounding activations may cost, and adding up in another order
_TOLERANCES = {8: 2e-2, 16: 1e-4}
_FLOAT_TOLERANCE = 1e-5
_TEXT = TextConfig(
    vocab_size=8, hidden_size=64, intermediate_size=64, num_layers=2, num_heads=8, num_kv_heads=2,
    head_dim=16, max_position_embeddings=128,
)  # fmt: skip
_CPU = torch.device("cpu")


def right_kinds(library: Library, bits: int) -> frozenset[Kind]:
    """The forms of weights whose products are right."""
    return frozenset(kind for kind in Kind if _is_right(library, kind, bits))


def attention_is_right(library: Library) -> bool:
    """Whether rotation, keeping and attention are."""
    return all(_attends_right(library, dtype) for dtype in FLOAT_KINDS)


def full_attention_is_right(library: Library) -> bool:
    """Whether images' attention is: all and some of the tokens, of two images with odd sizes."""
    projected = _numbers(2 * 37, 3 * 3 * 24).view(2, 37, -1) * 3
    queries, keys, values = split_heads(projected, num_heads=3)
    return all(
        _is_near(
            mix_by_kernel(library, part, keys, values),
            mix_values(part, keys, values),
            _FLOAT_TOLERANCE,
        )
        for part in (queries, queries[:, :, 5:9])
    )


def layers_are_right(library: Library, bits: int) -> bool:
    """Whether two layers in one call give what their parts do in calls of their own, which are probed elsewhere."""
    width, inner, heads = _TEXT.hidden_size, 96, _TEXT.num_heads * _TEXT.head_dim
    kv = _TEXT.num_kv_heads * _TEXT.head_dim
    gain = torch.ones(width)
    norm = {"before": Before.RMS_NORM, "gain": gain, "eps": 1e-5}
    products = LayerProducts(
        Product(
            library, [_float(heads, width), _float(kv, width), _float(kv, width)], bits, **norm
        ),
        Product(library, [_float(width, heads)], bits),
        Product(library, [_float(inner, width), _float(inner, width)], bits, **norm),
        Product(library, [_float(width, inner)], bits, Before.SILU_GATE),
    )
    spans = [Span(0, 1, 2, [7]), Span(1, 1, 90, [5, 0, 3, 9, 8, 2])]
    plan = plan_attention(spans, 16, torch.float32, _CPU)
    pools = [KVCachePool(_TEXT, 10, 16, torch.float32, _CPU) for _ in range(2)]
    for pool in pools:
        pool._data.copy_(_numbers(pool._data.numel() // 16, 16).view(pool._data.shape))
    rotation = RotaryTable(_TEXT, 128, torch.float32, _CPU).at(torch.tensor([2, 90]))
    once, apart = (PagedAttention(library, _TEXT, pool, plan, rotation) for pool in pools)
    found, expected = _numbers(2, width), _numbers(2, width)
    LayerChain(library, [products] * _TEXT.num_layers)(found, once)
    for layer in range(_TEXT.num_layers):
        products.out(apart(layer, products.qkv(expected)), add_to=expected)
        products.down(products.gate_up(expected), add_to=expected)
    return torch.equal(found, expected) and torch.equal(pools[0]._data, pools[1]._data)


def _float(num_outputs: int, num_inputs: int) -> Weights:
    return Weights(Kind.FLOAT32, num_outputs, num_inputs, _numbers(num_outputs, num_inputs) / 8)


def _is_right(library: Library, kind: Kind, bits: int) -> bool:
    weights, meant = _example(kind)
    tolerance = _TOLERANCES[bits] if kind >= Kind.INT8 else _FLOAT_TOLERANCE
    for num_tokens in _NUM_TOKENS:
        x = _numbers(num_tokens, _NUM_INPUTS)
        found = Product(library, [weights], bits)(x)
        if not _is_near(found, x @ meant.t(), tolerance):
            return False
    return True


def _example(kind: Kind) -> tuple[Weights, Tensor]:
    """Weights, and what they mean. Shapes: (N, K)."""
    numbers = _numbers(_NUM_OUTPUTS, _NUM_INPUTS)
    shape = (_NUM_OUTPUTS, _NUM_INPUTS)
    for dtype, float_kind in FLOAT_KINDS.items():
        if kind is float_kind:
            stored = numbers.to(dtype)
            return Weights(kind, *shape, stored), stored.float()
    if kind is Kind.INT8:
        integers, scale = (numbers * 127).to(torch.int8), _numbers(1, _NUM_OUTPUTS)[0]
        blocks = pack_int8(integers)
        meant = integers * scale[:, None]
        return Weights(kind, *shape, blocks, INT8_GROUP, scale), meant
    dtype = torch.float32 if kind is Kind.INT4 else torch.bfloat16
    integers = (numbers.abs() * 15).to(torch.uint8).view(_NUM_OUTPUTS, -1, _GROUP)
    scale_zero = _numbers(integers.shape[1] * _NUM_OUTPUTS, 2).view(-1, _NUM_OUTPUTS, 2).to(dtype)
    scale, zero = scale_zero.float().transpose(0, 1).unbind(2)
    meant = ((integers.float() - 8) * scale[..., None] + zero[..., None]).flatten(1)
    return Weights(kind, *shape, pack_int4(integers, scale_zero), _GROUP), meant


def _attends_right(library: Library, dtype: torch.dtype) -> bool:
    """A short and a long context, whose blocks lie apart, beside a prompt."""
    spans = [Span(0, 1, 2, [7]), Span(1, 1, 90, [5, 0, 3, 9, 8, 2]), Span(2, 3, 0, [4])]
    plan = plan_attention(spans, 16, dtype, _CPU)
    pools = [KVCachePool(_TEXT, 10, 16, dtype, _CPU) for _ in range(2)]
    for pool in pools:
        for stored in pool.blocks(0):
            stored.copy_(_numbers(stored.numel() // 16, 16).view(stored.shape))
    heads = _TEXT.num_heads + 2 * _TEXT.num_kv_heads
    qkv = _numbers(5, heads * _TEXT.head_dim)
    rotation = RotaryTable(_TEXT, 128, torch.float32, _CPU).at(torch.tensor([2, 90, 0, 1, 2]))
    sizes = [_TEXT.num_heads, _TEXT.num_kv_heads, _TEXT.num_kv_heads]
    query, key, value = qkv.view(5, heads, -1).split(sizes, dim=1)
    expected = paged_attention_by_sequence(
        pools[1],
        plan,
        0,
        rotate(query, *rotation),
        rotate(key, *rotation).to(dtype),
        value.to(dtype),
    )
    found = PagedAttention(library, _TEXT, pools[0], plan, rotation)(0, qkv.clone())
    tolerance = max(_FLOAT_TOLERANCE, torch.finfo(dtype).eps)
    kept = zip(pools[0].blocks(0), pools[1].blocks(0), strict=True)
    return _is_near(found, expected, tolerance) and all(
        _is_near(ours.float(), theirs.float(), tolerance) for ours, theirs in kept
    )


def _numbers(rows: int, columns: int) -> Tensor:
    """Fixed numbers within -1..1, without touching the random state."""
    return torch.sin(torch.arange(rows * columns, dtype=torch.float32) * 0.7).view(rows, columns)


def _is_near(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((found - expected).norm() <= tolerance * expected.norm())
