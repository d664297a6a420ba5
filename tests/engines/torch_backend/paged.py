"""Test steps over a paged cache, and attention computed from its definition."""

import torch
from torch import Tensor
from torch.testing import assert_close

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.rotary import RotaryTable, rotate
from engines.torch_backend.ops.paged_attention.reference import PLAIN, CreateAttention, Heads
from engines.torch_backend.step import BidirectionalSpan, SequenceRows, StepInputs
from tests.factories_torch import make_text_config

BLOCK_SIZE = 4
NUM_BLOCKS = 128
CPU = torch.device("cpu")


def make_sequences(shares: list[tuple[int, int]]) -> list[SequenceRows]:
    """Returns sequences of (new, computed) tokens whose blocks are scattered in a pool."""
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(5)).tolist()
    sequences, start = [], 0
    for num_new, num_computed in shares:
        num_blocks = -(-(num_new + num_computed) // BLOCK_SIZE)
        blocks = [free.pop() for _ in range(num_blocks)]
        sequences.append(SequenceRows(start, num_new, num_computed, blocks))
        start += num_new
    return sequences


def make_inputs(
    shares: list[tuple[int, int]], bidirectional: list[BidirectionalSpan] | None = None
) -> StepInputs:
    sequences = make_sequences(shares)
    return StepInputs.create(sequences, BLOCK_SIZE, CPU, bidirectional=bidirectional or [])


def make_pool(
    dtype: torch.dtype = torch.float32, num_kv_heads: int = 2, head_dim: int = 8
) -> KVCachePool:
    """Returns a pool with random keys and values in all slots."""
    text = make_text_config(num_kv_heads=num_kv_heads, head_dim=head_dim)
    pool = KVCachePool(text, NUM_BLOCKS, BLOCK_SIZE, dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
    for layer in range(text.num_layers):
        shape = (2, len(slots), num_kv_heads, head_dim)
        pool.write(layer, slots, *torch.randn(shape, generator=generator).to(dtype))
    return pool


def slots_of(sequence: SequenceRows) -> Tensor:
    """Returns the slots of the sequence's whole context. Shapes: returns (1, T)."""
    indices = torch.arange(sequence.num_context)
    blocks = torch.tensor(sequence.block_ids)[indices // BLOCK_SIZE]
    return (blocks * BLOCK_SIZE + indices % BLOCK_SIZE)[None]


def in_sections(rotary: RotaryTable, sections: tuple[int, ...]) -> RotaryTable:
    """Returns a table that rotates each section of channel pairs by its own row of positions."""
    rows = torch.arange(len(sections)).repeat_interleave(torch.tensor(sections)).repeat(2)
    return RotaryTable(rotary.cos, rotary.sin, rows.to(rotary.cos.device), len(sections))


def attend_by_definition(
    pool: KVCachePool,
    inputs: StepInputs,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: Heads = PLAIN,
) -> Tensor:
    """Attends token by token, in layer 1. Shapes: query (N, H, D), key and value (N, K, D); returns (N, H * D)."""
    pool.write(1, inputs.slots, key.to(pool.dtype), value.to(pool.dtype))
    last, ignores = inputs.indices.tolist(), set()
    for span in inputs.bidirectional if heads.is_bidirectional else ():
        last[span.start : span.stop] = [span.last] * (span.stop - span.start)
        ignores |= {*range(span.start, span.stop)} if span.ignores_window else set()
    rows = []
    for sequence in inputs.sequences:
        keys, values = (x[0].float() for x in pool.read(1, slots_of(sequence)))
        for row in range(sequence.start, sequence.stop):
            index = sequence.num_computed + row - sequence.start
            first = 0 if heads.window is None or row in ignores else index - heads.window + 1
            if heads.chunk is not None:
                first = max(first, index // heads.chunk * heads.chunk)
            seen = slice(max(0, first), last[row] + 1)
            group = query.shape[1] // keys.shape[1]
            near, far = (x[seen].repeat_interleave(group, dim=1) for x in (keys, values))
            scale = heads.scale or query.shape[2] ** -0.5
            scores = torch.einsum("hd,thd->ht", query[row].float(), near) * scale
            if heads.softcap is not None:
                scores = heads.softcap * torch.tanh(scores / heads.softcap)
            if heads.sinks is not None:
                scores = torch.cat([scores, heads.sinks[:, None]], dim=1)
            weights = scores.softmax(-1)[:, : len(far)]
            rows.append(torch.einsum("ht,thd->hd", weights, far).flatten())
    return torch.stack(rows)


def check(
    create: CreateAttention,
    inputs: StepInputs,
    heads: Heads = PLAIN,
    shape: tuple[int, int, int] = (4, 2, 8),
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
    rotates: bool = False,
) -> None:
    """Checks an implementation against the definition. `shape`: query heads, key heads, head width."""
    num_heads, num_kv_heads, head_dim = shape
    text = make_text_config(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    rotation = (
        RotaryTable.create(text, 256, torch.float32, CPU).at(inputs.indices) if rotates else None
    )
    pools = [make_pool(dtype, num_kv_heads, head_dim) for _ in range(2)]
    qkv = torch.randn(len(inputs.slots), (num_heads + 2 * num_kv_heads) * head_dim)
    qkv = qkv.to(dtype).float()
    sizes = [num_heads, num_kv_heads, num_kv_heads]
    query, key, value = qkv.view(len(qkv), -1, head_dim).split(sizes, dim=1)
    query, key = heads.normed(query, key)
    if rotation is not None:
        query, key = (rotate(x, *rotation) for x in (query, key))
    expected = attend_by_definition(pools[1], inputs, query, key, value, heads)
    found = create(num_heads, pools[0], inputs, rotation)(1, qkv.clone(), heads)
    assert_close(found.float(), expected, rtol=tolerance, atol=tolerance)
    assert_close(pools[0].data, pools[1].data, rtol=tolerance, atol=tolerance)
