"""Attention of a step's new tokens over the paged keys and values of their own sequences.

Used by the runner, which plans a step once (`plan_attention`) and hands the decoder a function of this module
for all its layers. `paged_attention` is the fast way; `paged_attention_by_sequence` says the same in the
plainest form, and tests hold the two together. Neither knows requests, images or sampling.

The plan's order: sequences with one new token come first and are computed together, over a table of blocks
padded to the longest; longer runs follow, one by one. Within one sequence:

    tokens     |<---- num_computed ---->|<---- num_new ---->|
    are        in the pool already       written by this step, and read by it
    token i of the new ones sees tokens 0 .. num_computed + i

Shape letters: N new tokens of the batch, S sequences, H query heads, K key/value heads, G = H / K, D head
width, T context length. Source: PagedAttention, Kwon et al. 2023, section 4.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's share of a step. `start` is the place of its first new token in the flat batch."""

    start: int
    num_new: int
    num_computed: int
    block_ids: list[int]

    @property
    def stop(self) -> int:
        """The place after its last new token."""
        return self.start + self.num_new

    @property
    def num_context(self) -> int:
        """Its tokens after this step."""
        return self.num_computed + self.num_new


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """What the heads of a layer do beside plain attention."""

    query_norm: RMSNorm | None = None  #: of each head, before it is turned
    key_norm: RMSNorm | None = None
    window: int | None = None  #: tokens that a token sees, itself included
    turns: bool = True  #: whether positions turn them
    rope: int = 0  #: by which of the model's tables of angles

    def normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: query (N, H, D), key (N, K, D), kept."""
        if self.query_norm is not None:
            query = self.query_norm(query)
        return query, key if self.key_norm is None else self.key_norm(key)


PLAIN = Heads()


@dataclass(frozen=True)
class Continuation:
    """A run of new tokens that also sees tokens of earlier steps."""

    span: Span
    blocks: Tensor  #: (blocks of the context,)
    dtype: torch.dtype

    @cached_property
    def mask(self) -> Tensor:
        """Added to the scores by who has no kernel for it. Shapes: (num_new, num_context)."""
        size = (self.span.num_new, self.span.num_context)
        hidden = torch.ones(size, dtype=torch.bool, device=self.blocks.device)
        hidden = hidden.triu_(diagonal=self.span.num_computed + 1)
        mask = torch.zeros(size, dtype=self.dtype, device=self.blocks.device)
        return mask.masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a step share."""

    spans: list[Span]
    slots: Tensor  #: (N,) where new keys and values go
    num_decodes: int  #: leading spans of one new token each
    #: Tokens of the longest of them, in whole blocks unless all are equally long.
    decode_context: int
    decode_blocks: Tensor | None  #: (decodes * blocks of the longest,)
    #: (decodes, 1, 1, decode_context), added to the scores; None: all see all.
    decode_mask: Tensor | None
    continuations: dict[int, Continuation]  #: by place in `spans`
    fresh_blocks: Tensor | None  #: blocks begun by this step and left partly unwritten


def plan_attention(
    spans: list[Span], block_size: int, dtype: torch.dtype, device: torch.device
) -> AttentionPlan:
    """Plan a step. Spans of one new token come first, and `start` counts on from 0."""
    decodes = [span for span in spans if span.num_new == 1]
    context, blocks, mask = _plan_decodes(decodes, block_size, dtype)
    fresh = _fresh_blocks(spans, block_size)
    return AttentionPlan(
        spans=spans,
        slots=torch.from_numpy(_slots(spans, block_size)).to(device),
        num_decodes=len(decodes),
        decode_context=context,
        decode_blocks=None if blocks is None else blocks.to(device),
        decode_mask=None if mask is None else mask.to(device),
        continuations={
            place: _continue(span, block_size, dtype, device)
            for place, span in enumerate(spans)
            if span.num_new > 1 and span.num_computed > 0
        },
        fresh_blocks=torch.tensor(fresh, device=device) if fresh else None,
    )


def _slots(spans: list[Span], block_size: int) -> np.ndarray:
    """The slot of every new token. Shapes: (N,)."""
    slots = np.empty(spans[-1].stop if spans else 0, dtype=np.int64)
    for span in spans:
        if span.num_new == 1:
            block, offset = divmod(span.num_computed, block_size)
            slots[span.start] = span.block_ids[block] * block_size + offset
            continue
        positions = np.arange(span.num_computed, span.num_context)
        blocks = np.asarray(span.block_ids)[positions // block_size]
        slots[span.start : span.stop] = blocks * block_size + positions % block_size
    return slots


def _plan_decodes(
    decodes: list[Span], block_size: int, dtype: torch.dtype
) -> tuple[int, Tensor | None, Tensor | None]:
    """Context length, block table and mask of the sequences with one new token."""
    if not decodes:
        return 0, None, None
    lengths = np.array([span.num_context for span in decodes])
    longest = int(lengths.max())
    width = -(-longest // block_size)
    table = np.empty((len(decodes), width), dtype=np.int64)
    for row, span in zip(table, decodes, strict=True):
        num_used = -(-span.num_context // block_size)
        row[:num_used] = span.block_ids[:num_used]
        row[num_used:] = span.block_ids[0]  # masked, but read: a sequence pads with what is its own
    blocks = torch.from_numpy(table.ravel())
    if (lengths == longest).all():
        return longest, blocks, None
    context = width * block_size
    hidden = torch.from_numpy(np.arange(context) >= lengths[:, None])
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
    return context, blocks, mask[:, None, None, :]


def _continue(
    span: Span, block_size: int, dtype: torch.dtype, device: torch.device
) -> Continuation:
    """A run that starts after position 0."""
    num_used = -(-span.num_context // block_size)
    return Continuation(span, torch.tensor(span.block_ids[:num_used], device=device), dtype)


def _fresh_blocks(spans: list[Span], block_size: int) -> list[int]:
    """Last blocks that a step begins but does not fill.

    They are zeroed first: what an earlier owner left in the rest is masked, but if that was not a number,
    zero times it would not be one either.
    """
    fresh = []
    for span in spans:
        block, offset = divmod(span.num_context, block_size)
        if offset and block * block_size >= span.num_computed:
            fresh.append(span.block_ids[block])
    return fresh


def paged_attention(
    pool: KVCachePool, plan: AttentionPlan, layer: int, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Keep the new keys and values, and attend each new token to its own sequence.

    Shapes: query (N, H, D), key and value (N, K, D); returns (N, H * D).
    """
    key, value = pool.write(layer, plan.slots, key, value)
    if plan.num_decodes == len(plan.spans):
        return _attend_decodes(pool, plan, layer, query)
    runs = attend_runs(pool, plan, layer, query, key, value)
    if not plan.num_decodes:
        return runs
    return torch.cat([_attend_decodes(pool, plan, layer, query[: plan.num_decodes]), runs])


def attend_runs(
    pool: KVCachePool, plan: AttentionPlan, layer: int, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """The sequences with several new tokens, whose keys and values are kept already.

    Shapes: query (N, H, D), key and value (N, K, D), of all sequences; returns (N - decodes, H * D).
    """
    parts = []
    for place in range(plan.num_decodes, len(plan.spans)):
        span = plan.spans[place]
        run = slice(span.start, span.stop)
        continuation = plan.continuations.get(place)
        if continuation is None:
            parts.append(_attend_run(query[run], key[run], value[run], mask=None))
        else:
            keys, values = pool.read(layer, continuation.blocks)
            context = slice(span.num_context)
            parts.append(_attend_run(query[run], keys[context], values[context], continuation.mask))
    return torch.cat(parts)


def _attend_decodes(pool: KVCachePool, plan: AttentionPlan, layer: int, query: Tensor) -> Tensor:
    """One new token of each of S sequences, together. Shapes: query (S, H, D); returns (S, H * D).

    The G query heads that share a key/value head stand where queries of one head would, so that keys and
    values need no repetition.
    """
    assert plan.decode_blocks is not None
    keys, values = pool.read(layer, plan.decode_blocks)
    num_sequences, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    by_sequence = (num_sequences, -1, num_kv_heads, head_dim)
    context = slice(plan.decode_context)
    out = F.scaled_dot_product_attention(
        query.view(num_sequences, num_kv_heads, num_heads // num_kv_heads, head_dim),
        keys.view(by_sequence)[:, context].transpose(1, 2),
        values.view(by_sequence)[:, context].transpose(1, 2),
        attn_mask=plan.decode_mask,
    )
    return out.reshape(num_sequences, num_heads * head_dim)


def _attend_run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """A run of one sequence; without mask it starts at position 0, and the flash kernel's causal form serves.

    Shapes: query (n, H, D), key and value (T, K, D); returns (n, H * D).
    """
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.squeeze(0).transpose(0, 1).flatten(1)


def paged_attention_by_sequence(
    pool: KVCachePool, plan: AttentionPlan, layer: int, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """What `paged_attention` computes, sequence by sequence, from the definition. Shapes: the same."""
    pool.write(layer, plan.slots, key, value)
    out = torch.empty_like(query)
    for span in plan.spans:
        num_used = -(-span.num_context // pool.block_size)
        blocks = torch.tensor(span.block_ids[:num_used], device=query.device)
        keys, values = (x[: span.num_context].float() for x in pool.read(layer, blocks))
        group = query.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(group, dim=1)  # (T, H, D)
        values = values.repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,thd->hnt", query[span.start : span.stop].float(), keys)
        positions = torch.arange(span.num_computed, span.num_context, device=query.device)
        hidden = torch.arange(span.num_context, device=query.device) > positions[:, None]
        weights = (scores / query.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        out[span.start : span.stop] = torch.einsum("hnt,thd->nhd", weights, values).to(out.dtype)
    return out.flatten(1)
