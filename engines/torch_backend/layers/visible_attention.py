"""Attention over pages where tokens do not see all that is before them, or scores are not plain.

The reference implementation of windows, chunks, soft caps, sinks, scales of their own, and values that are narrower than
keys. What a token sees is a run of tokens of its own sequence, from a first to a last one. The plan's order is that of
`plan_attention`: sequences with one new token are computed together, longer runs one by one.

Shape letters: N new tokens, S sequences with one of them, H query heads, K key/value heads, G = H / K, D key width,
E value width, T context length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import AttentionPlan


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer scores keys. Sinks (H,) take their share of the weight and give nothing."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Context:
    """What some new tokens see: blocks of the pool, and of the slots in these the visible ones."""

    blocks: Tensor
    visible: Tensor  #: (S, T), or (n, T) of one sequence


class Visible:
    """What the new tokens of a step see, for all layers of one kind. Blocks that nobody sees are not read."""

    def __init__(self, plan: AttentionPlan, block_size: int, first: Tensor, last: Tensor) -> None:
        """`first` and `last` are places in a token's own sequence. Shapes: (N,)."""
        self.plan = plan
        self.decodes: _Context | None = None
        if plan.num_decodes:
            decodes = slice(plan.num_decodes)
            self.decodes = _decode_context(plan, block_size, first[decodes], last[decodes])
        self.runs: list[_Context] = []
        for span in plan.spans[plan.num_decodes :]:
            run = slice(span.start, span.stop)
            start = int(first[run].min()) // block_size
            blocks = span.block_ids[start : -(-span.num_context // block_size)]
            places = torch.arange(start * block_size, span.num_context, device=first.device)
            visible = (places >= first[run, None]) & (places <= last[run, None])
            self.runs.append(_Context(torch.tensor(blocks, device=first.device), visible))


class Windows:
    """What the new tokens of a step see, by window."""

    def __init__(self, plan: AttentionPlan, block_size: int) -> None:
        self._plan = plan
        self._block_size = block_size
        self._seen: dict[int, Visible] = {}

    def attend(
        self, pool: KVCachePool, layer: int, window: int, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Keep the new keys and values, and attend each token to so many, itself included.

        Shapes: query (N, H, D), key and value (N, K, D); returns (N, H * D).
        """
        if window not in self._seen:
            places = [torch.arange(s.num_computed, s.num_context) for s in self._plan.spans]
            last = torch.cat(places).to(query.device)
            first = (last - window + 1).clamp(min=0)
            self._seen[window] = Visible(self._plan, self._block_size, first, last)
        scores = Scores(query.shape[-1] ** -0.5)
        seen = self._seen[window]
        return visible_attention(pool, layer, seen, query, key, value, scores).flatten(1)


def _decode_context(plan: AttentionPlan, block_size: int, first: Tensor, last: Tensor) -> _Context:
    """The blocks that sequences with one new token see, padded to the most. Shapes: first, last (S,)."""
    assert plan.decode_blocks is not None
    table = plan.decode_blocks.view(plan.num_decodes, -1)
    start, stop = first // block_size, last // block_size + 1
    columns = start[:, None] + torch.arange(int((stop - start).max()), device=first.device)
    blocks = table.gather(1, columns.clamp(max=table.shape[1] - 1))
    offsets = torch.arange(block_size, device=first.device)
    places = (columns[:, :, None] * block_size + offsets).flatten(1)
    visible = (places >= first[:, None]) & (places <= last[:, None])
    return _Context(blocks.flatten(), visible)


def visible_attention(
    pool: KVCachePool,
    layer: int,
    seen: Visible,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: Scores,
) -> Tensor:
    """Keep the new keys and values, and attend each new token to what it sees.

    Shapes: query (N, H, D), key (N, K, D), value (N, K, E); returns (N, H, E).
    """
    widths = key.shape[-1], value.shape[-1]
    room = pool.head_dim
    key, value = (F.pad(x, (0, room - x.shape[-1])) for x in (key, value))
    pool.write(layer, seen.plan.slots, key, value)
    parts = []
    if seen.decodes is not None:
        num = seen.plan.num_decodes
        keys, values = _read(pool, layer, seen.decodes.blocks, widths)
        keys, values = (x.unflatten(0, (num, -1)) for x in (keys, values))
        visible = seen.decodes.visible[:, None]
        parts.append(_attend(query[:num, None], keys, values, visible, scores)[:, 0])
    for span, context in zip(seen.plan.spans[seen.plan.num_decodes :], seen.runs, strict=True):
        length = context.visible.shape[1]
        keys, values = (x[None, :length] for x in _read(pool, layer, context.blocks, widths))
        run = query[None, span.start : span.stop]
        parts.append(_attend(run, keys, values, context.visible[None], scores)[0])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read(
    pool: KVCachePool, layer: int, blocks: Tensor, widths: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    keys, values = pool.read(layer, blocks)
    return keys[..., : widths[0]], values[..., : widths[1]]


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scores: Scores) -> Tensor:
    """Sequences of equally many new tokens. Shapes: query (S, n, H, D), key (S, T, K, D), value (S, T, K, E), visible (S, n, T); returns (S, n, H, E)."""
    if scores.softcap is None and scores.sinks is None:
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            attn_mask=visible[:, None],
            scale=scores.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.transpose(1, 2)
    grouped = query.unflatten(2, (key.shape[2], -1))
    weights = torch.einsum("snkgd,stkd->skgnt", grouped, key) * scores.scale
    if scores.softcap is not None:
        weights = torch.tanh(weights / scores.softcap) * scores.softcap
    weights = weights.masked_fill(~visible[:, None, None], -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(weights.dtype).view(1, key.shape[2], -1, 1, 1)
        weights = torch.cat([weights, sinks.expand(*weights.shape[:-1], 1)], dim=-1)
    weights = weights.softmax(-1, dtype=torch.float32).to(value.dtype)
    return torch.einsum("skgnt,stke->snkge", weights[..., : key.shape[1]], value).flatten(2, 3)
