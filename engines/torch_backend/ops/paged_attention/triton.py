"""Paged attention for one new token per sequence, with each context split among Triton programs.

One kernel attends to a part of each context; a second one merges the parts by their maxima and sums of
exponentials. The device computes the bounds of the parts from the context's length, so that one launch, and one CUDA
graph, serves all lengths.
Sources: FlashAttention, Dao et al. 2022; split contexts: Flash-Decoding, Dao et al. 2023; pages: Kwon et al. 2023.

Shape letters: S sequences, H query heads, K key/value heads, G = H / K, D head width, P parts of a context.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# The launcher accepts `num_warps` and `num_stages` besides the kernel's arguments.
import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.ops.triton_types import product_dtype

_TILE = 64  # tokens per iteration of a program
_WANTED_PROGRAMS = 528  # four per multiprocessor of an H200
_MAX_PARTS = 32
_UNLIMITED = 1 << 30


@triton.jit
def _share(lengths, sequence, part, window, P: tl.constexpr, TILE: tl.constexpr):
    """The token range of one part of the visible context. All parts except the last consist of whole tiles."""
    length = tl.load(lengths + sequence).to(tl.int32)
    begin = tl.maximum(length - window, 0)
    tiles_per_part = tl.cdiv(tl.cdiv(length - begin, TILE), P)
    start = begin + part * tiles_per_part * TILE
    return start, tl.minimum(start + tiles_per_part * TILE, length)


@triton.jit
def _cells(table, tokens, seen, kv_head, BLOCK_SIZE: tl.constexpr, K: tl.constexpr):
    """Offsets of a sequence's tokens in the cache, counted in vectors of one head."""
    blocks = tl.load(table + tokens // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
    return (blocks * BLOCK_SIZE + tokens % BLOCK_SIZE) * K + kv_head


@triton.jit(do_not_specialize=["table_width", "window"])
def _attend_part_kernel(
    query,  # (S, K, D)
    keys,  # (slots, K, D)
    values,  # (slots, K, D)
    tables,  # (S, table_width)
    lengths,  # (S,)
    part_out,  # (S, K, P, D) float32
    part_max,  # (S, K, P) float32
    part_sum,  # (S, K, P) float32
    factor,
    table_width,
    window,  # visible tokens
    BLOCK_SIZE: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """For one query head per key head: a program computes vector-matrix products over one part of one context."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    start, stop = _share(lengths, sequence, part, window, P, TILE)
    d = tl.arange(0, BLOCK_D)
    row = sequence * K + head
    q = tl.load(query + row * D + d, mask=d < D, other=0.0).to(tl.float32) * factor
    best = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    out = tl.zeros([BLOCK_D], tl.float32)
    for first in range(start, stop, TILE):
        tokens = first + tl.arange(0, TILE)
        seen = tokens < stop
        cells = _cells(tables + sequence * table_width, tokens, seen, head, BLOCK_SIZE, K)
        mask = seen[:, None] & (d < D)[None, :]
        key = tl.load(keys + cells[:, None] * D + d[None, :], mask=mask, other=0)
        value = tl.load(values + cells[:, None] * D + d[None, :], mask=mask, other=0)
        scores = tl.sum(key.to(tl.float32) * q[None, :], axis=1)
        scores = tl.where(seen, scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=0))
        shrink = tl.exp(best - new_best)
        weights = tl.exp(scores - new_best)
        total = total * shrink + tl.sum(weights, axis=0)
        out = out * shrink + tl.sum(value.to(tl.float32) * weights[:, None], axis=0)
        best = new_best
    place = row * P + part
    tl.store(part_max + place, best)
    tl.store(part_sum + place, total)
    tl.store(part_out + place * D + d, out, mask=d < D)


@triton.jit(do_not_specialize=["table_width", "window"])
def _attend_part_grouped_kernel(
    query,  # (S, K, G, D)
    keys,  # (slots, K, D)
    values,  # (slots, K, D)
    tables,  # (S, table_width)
    lengths,  # (S,)
    part_out,  # (S, K, G, P, D) float32
    part_max,  # (S, K, G, P) float32
    part_sum,  # (S, K, G, P) float32
    factor,
    table_width,
    window,  # visible tokens
    BLOCK_SIZE: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """For G query heads per key head: a program computes all of them over one part of one context."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    start, stop = _share(lengths, sequence, part, window, P, TILE)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    rows = (sequence * K + kv_head) * G + g
    query_mask = (g < G)[:, None] & (d < D)[None, :]
    q = tl.load(query + rows[:, None] * D + d[None, :], mask=query_mask, other=0.0).to(PRODUCT)
    best = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(start, stop, TILE):
        tokens = first + tl.arange(0, TILE)
        seen = tokens < stop
        cells = _cells(tables + sequence * table_width, tokens, seen, kv_head, BLOCK_SIZE, K)
        mask = seen[:, None] & (d < D)[None, :]
        key = tl.load(keys + cells[:, None] * D + d[None, :], mask=mask, other=0).to(PRODUCT)
        value = tl.load(values + cells[:, None] * D + d[None, :], mask=mask, other=0).to(PRODUCT)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee") * factor
        scores = tl.where(seen[None, :], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp(best - new_best)
        weights = tl.exp(scores - new_best[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        out = out * shrink[:, None] + tl.dot(weights.to(PRODUCT), value, input_precision="ieee")
        best = new_best
    places = rows * P + part
    tl.store(part_max + places, best, mask=g < G)
    tl.store(part_sum + places, total, mask=g < G)
    tl.store(part_out + places[:, None] * D + d[None, :], out, mask=query_mask)


@triton.jit
def _join_kernel(
    part_out, part_max, part_sum, out, D: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program merges the parts of one head of one sequence. An empty context results in zeros."""
    head = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    sums = tl.load(part_sum + head * P + p, mask=p < P, other=0.0)
    maxima = tl.load(part_max + head * P + p, mask=p < P, other=-float("inf"))
    best = tl.maximum(tl.max(maxima, axis=0), -1e38)  # finite even for an empty context
    shrink = tl.exp(maxima - best)
    total = tl.sum(sums * shrink, axis=0)
    mask = (p < P)[:, None] & (d < D)[None, :]
    parts = tl.load(part_out + (head * P + p)[:, None] * D + d[None, :], mask=mask, other=0.0)
    joined = tl.sum(parts * shrink[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + head * D + d, joined.to(out.dtype.element_ty), mask=d < D)


def attend_decodes(
    pool: KVCachePool,
    layer: int,
    query: Tensor,
    tables: Tensor,
    lengths: Tensor,
    window: int | None = None,
) -> Tensor:
    """Attention of one new token per sequence to its context in the pool, or to the last `window` tokens of it.

    Shapes: query (S, H, D), tables (S, blocks), lengths (S,); returns (S, H * D).
    """
    keys, values = pool.blocks(layer)
    num_sequences, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    max_seen = min(tables.shape[1] * pool.block_size, window or _UNLIMITED)
    num_parts = choose_num_parts(num_sequences * num_kv_heads, max_seen)
    part_shape = (num_sequences, num_heads, num_parts)
    sizes = ((*part_shape, head_dim), part_shape, part_shape)  # for outputs, maxima and sums
    parts = [query.new_empty(size, dtype=torch.float32) for size in sizes]
    block_d = triton.next_power_of_2(head_dim)
    constants = {
        "BLOCK_SIZE": pool.block_size,
        "K": num_kv_heads,
        "D": head_dim,
        "P": num_parts,
        # keys and values are double-buffered; for wide float32 heads, only half a tile fits
        "TILE": _TILE if block_d * query.element_size() <= 512 else _TILE // 2,
        "BLOCK_D": block_d if group == 1 else max(16, block_d),
    }
    kernel = _attend_part_kernel
    if group > 1:
        kernel = _attend_part_grouped_kernel
        # tensor cores need at least 16 rows and columns
        constants |= {"G": group, "BLOCK_G": max(16, triton.next_power_of_2(group))}
        constants |= {"PRODUCT": product_dtype(query.dtype)}
    kernel[(num_sequences, num_kv_heads, num_parts)](
        query.contiguous(),
        keys,
        values,
        tables,
        lengths,
        *parts,
        head_dim**-0.5,
        tables.shape[1],
        window or _UNLIMITED,
        **constants,
        num_warps=4,
        num_stages=2,
    )
    out = query.new_empty(num_sequences, num_heads * head_dim)
    _join_kernel[(num_sequences * num_heads,)](
        *parts,
        out,
        D=head_dim,
        P=num_parts,
        BLOCK_P=triton.next_power_of_2(num_parts),
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=1,
    )
    return out


def choose_num_parts(num_rows: int, max_context: int) -> int:
    """Enough parts to fill the device, each at least a tile. A power of two, to compile fewer variants."""
    wanted = min(_WANTED_PROGRAMS // num_rows, -(-max_context // _TILE), _MAX_PARTS)
    return 1 << max(wanted, 1).bit_length() - 1
