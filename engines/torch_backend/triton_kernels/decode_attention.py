"""Attention of one new token a sequence over keys and values in pages, the context split among programs.

Twin: `decoder_ops.attend_decodes`. A first launch attends to a share of each context, a second one joins the
shares: softmax over parts needs each part's maximum and sum alone. How a context is divided is computed on the
device from its length, so that one launch, and one CUDA graph, fits all lengths.
Sources: FlashAttention, Dao et al. 2022; split contexts: Flash-Decoding, Dao et al. 2023; pages: Kwon et al. 2023.

Shape letters: S sequences, H query heads, K key/value heads, G = H / K, D head width, P parts of a context.
"""

# pyright: reportCallIssue=false
# The launcher takes `num_warps` and `num_stages` beside the kernel's own arguments.
import torch
import triton
import triton.language as tl
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.triton_kernels.products import product_dtype

_TILE = 64  # tokens that a program looks at together
_WANTED_PROGRAMS = 528  # four for each processor of an H200
_MAX_PARTS = 32


@triton.jit
def _attend_part_kernel(
    query,  # (S, H, D)
    keys,  # (slots, K, D)
    values,  # (slots, K, D)
    key_scales,  # (slots, K)
    value_scales,  # (slots, K)
    tables,  # (S, table_width)
    lengths,  # (S,)
    part_out,  # (S, H, P, D) float32
    part_max,  # (S, H, P) float32
    part_sum,  # (S, H, P) float32
    factor,
    table_width,
    BLOCK_SIZE: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_INT8: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """A program attends the G query heads of one key/value head to one part of one context."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    tiles_per_part = tl.cdiv(tl.cdiv(length, TILE), P)
    start = part * tiles_per_part * TILE
    stop = tl.minimum(start + tiles_per_part * TILE, length)

    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    heads = sequence * K * G + kv_head * G + g
    query_mask = (g < G)[:, None] & (d < D)[None, :]
    q = tl.load(query + heads[:, None] * D + d[None, :], mask=query_mask, other=0.0)

    best = tl.full([BLOCK_G], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    out = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(start, stop, TILE):
        tokens = first + tl.arange(0, TILE)
        seen = tokens < stop
        blocks = tl.load(
            tables + sequence * table_width + tokens // BLOCK_SIZE, mask=seen, other=0
        ).to(tl.int64)
        cells = (blocks * BLOCK_SIZE + tokens % BLOCK_SIZE) * K + kv_head
        places = cells[:, None] * D + d[None, :]
        mask = seen[:, None] & (d < D)[None, :]
        key = tl.load(keys + places, mask=mask, other=0)
        value = tl.load(values + places, mask=mask, other=0)
        if G == 1:  # a row by a matrix: no tensor core is needed
            scores = tl.sum(q.to(tl.float32) * key.to(tl.float32), axis=1)[None, :]
        else:
            scores = tl.dot(q.to(PRODUCT), tl.trans(key.to(PRODUCT)), input_precision="ieee")
        scores *= factor
        if IS_INT8:
            scores *= tl.load(key_scales + cells, mask=seen, other=0.0)[None, :]
        scores = tl.where(seen[None, :], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp(best - new_best)
        weights = tl.exp(scores - new_best[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        if IS_INT8:
            weights *= tl.load(value_scales + cells, mask=seen, other=0.0)[None, :]
        if G == 1:
            addend = tl.sum(tl.trans(weights) * value.to(tl.float32), axis=0)[None, :]
        else:
            addend = tl.dot(weights.to(PRODUCT), value.to(PRODUCT), input_precision="ieee")
        out = out * shrink[:, None] + addend
        best = new_best
    cells_out = heads * P + part
    tl.store(part_max + cells_out, best, mask=g < G)
    tl.store(part_sum + cells_out, total, mask=g < G)
    tl.store(part_out + cells_out[:, None] * D + d[None, :], out, mask=query_mask)


@triton.jit
def _join_kernel(
    part_out, part_max, part_sum, out, D: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program joins the parts of one head of one sequence; without any tokens it gives zeros."""
    head = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    sums = tl.load(part_sum + head * P + p, mask=p < P, other=0.0)
    maxima = tl.load(part_max + head * P + p, mask=p < P, other=-float("inf"))
    best = tl.maximum(tl.max(maxima, axis=0), -1e38)  # a number even where there is nothing
    shrink = tl.exp(maxima - best)
    total = tl.sum(sums * shrink, axis=0)
    mask = (p < P)[:, None] & (d < D)[None, :]
    parts = tl.load(part_out + (head * P + p)[:, None] * D + d[None, :], mask=mask, other=0.0)
    joined = tl.sum(parts * shrink[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + head * D + d, joined.to(out.dtype.element_ty), mask=d < D)


def attend_decodes(
    pool: KVCachePool, layer: int, query: Tensor, tables: Tensor, lengths: Tensor
) -> Tensor:
    """One new token of each sequence over its whole context, which the pool holds.

    Shapes: query (S, H, D), tables (S, blocks), lengths (S,); returns (S, H * D).
    """
    keys, values = pool.blocks(layer)
    scales = pool.scales(layer)
    num_sequences, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    group = num_heads // num_kv_heads
    num_parts = choose_num_parts(num_sequences * num_kv_heads, tables.shape[1] * pool.block_size)
    part_shape = (num_sequences, num_heads, num_parts)
    part_out = query.new_empty((*part_shape, head_dim), dtype=torch.float32)
    part_max, part_sum = (query.new_empty(part_shape, dtype=torch.float32) for _ in range(2))
    out = query.new_empty(num_sequences, num_heads * head_dim)
    block_d = triton.next_power_of_2(head_dim)
    _attend_part_kernel[(num_sequences, num_kv_heads, num_parts)](
        query.contiguous(),
        keys,
        values,
        keys if scales is None else scales[0],
        values if scales is None else scales[1],
        tables,
        lengths,
        part_out,
        part_max,
        part_sum,
        head_dim**-0.5,
        tables.shape[1],
        BLOCK_SIZE=pool.block_size,
        K=num_kv_heads,
        G=group,
        D=head_dim,
        P=num_parts,
        TILE=_TILE,
        # a product on tensor cores has 16 rows and columns at least
        BLOCK_G=1 if group == 1 else max(16, triton.next_power_of_2(group)),
        BLOCK_D=block_d if group == 1 else max(16, block_d),
        IS_INT8=scales is not None,
        PRODUCT=product_dtype(query.dtype),
        num_warps=4,
        num_stages=2,
    )
    _join_kernel[(num_sequences * num_heads,)](
        part_out,
        part_max,
        part_sum,
        out,
        D=head_dim,
        P=num_parts,
        BLOCK_P=triton.next_power_of_2(num_parts),
        BLOCK_D=block_d,
        num_warps=1,
    )
    return out


def choose_num_parts(num_rows: int, max_context: int) -> int:
    """Enough programs to fill the device, but none with less than a tile."""
    wanted = min(-(-_WANTED_PROGRAMS // num_rows), -(-max_context // _TILE))
    return max(1, min(wanted, _MAX_PARTS))
