"""Steps over a paged cache, and attention over it from the definition."""

import torch
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.ops.paged_attention.reference import PLAIN, Heads
from engines.torch_backend.step import BidirectionalSpan, SequenceRows, StepInputs
from tests.factories_torch import make_text_config

BLOCK_SIZE = 4
NUM_BLOCKS = 128
CPU = torch.device("cpu")


def make_sequences(shares: list[tuple[int, int]]) -> list[SequenceRows]:
    """Of (new, computed) tokens, whose blocks lie scattered through a pool."""
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
    dtype: torch.dtype = torch.float32,
    num_kv_heads: int = 2,
    head_dim: int = 8,
) -> KVCachePool:
    """Whose slots are written."""
    text = make_text_config(num_kv_heads=num_kv_heads, head_dim=head_dim)
    pool = KVCachePool(text, NUM_BLOCKS, BLOCK_SIZE, dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
    for layer in range(text.num_layers):
        shape = (2, len(slots), num_kv_heads, head_dim)
        pool.write(layer, slots, *torch.randn(shape, generator=generator).to(dtype))
    return pool


def slots_of(sequence: SequenceRows) -> Tensor:
    """Of its whole context. Shapes: returns (1, T)."""
    indices = torch.arange(sequence.num_context)
    blocks = torch.tensor(sequence.block_ids)[indices // BLOCK_SIZE]
    return (blocks * BLOCK_SIZE + indices % BLOCK_SIZE)[None]


def attend_by_definition(
    pool: KVCachePool,
    inputs: StepInputs,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    heads: Heads = PLAIN,
) -> Tensor:
    """Token by token, in layer 1. Shapes: query (N, H, D), key and value (N, K, D); returns (N, H * D)."""
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
