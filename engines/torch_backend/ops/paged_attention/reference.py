"""Paged attention in plain torch, for all variants.

Shape letters: N new tokens, S sequences, n new tokens of each, H query heads, K key/value heads, D head width, T
tokens of a context. Source: PagedAttention, Kwon et al. 2023, section 4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.norm import RMSNorm
from engines.torch_backend.layers.rotary import rotate
from engines.torch_backend.step import StepInputs


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """Attention parameters of a layer."""

    query_norm: RMSNorm | None = None  #: norm of each query head, before rotation
    key_norm: RMSNorm | None = None
    window: int | None = None  #: tokens that a token attends to, itself included
    rotates: bool = True
    rope: int = 0  #: index of the rotary table
    scale: float | None = None  #: factor of scores; None: D ** -0.5
    chunk: int | None = None  #: a token attends within its own chunk of this many tokens
    softcap: float | None = None
    sinks: Tensor | None = None  #: (H,), scores that receive weight but have no value
    is_bidirectional: bool = False  #: whether the layer applies the step's bidirectional spans

    def normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Shapes: query (N, H, D), key (N, K, D); returns the same."""
        if self.query_norm is not None:
            query = self.query_norm(query)
        return query, key if self.key_norm is None else self.key_norm(key)

    @property
    def has_odd_scores(self) -> bool:
        """Whether the layer has options that only the reference supports."""
        return (self.chunk, self.softcap, self.sinks) != (None, None, None)

    def is_plain(self, inputs: StepInputs) -> bool:
        """Whether attention is causal, optionally within a window, with unmodified scores."""
        return not (self.has_odd_scores or (self.is_bidirectional and inputs.bidirectional))


PLAIN = Heads()


class Attend(Protocol):
    """Normalises and rotates heads, writes keys and values to the cache, and attends."""

    def __call__(self, layer: int, qkv: Tensor, heads: Heads = PLAIN) -> Tensor:
        """Shapes: qkv (N, (H + 2 K) D), which can be changed in place; returns (N, H D)."""
        ...


#: Creates the attention of a step for H query heads over a pool. `rotation`: see `RotaryTable.at_all`.
CreateAttention = Callable[[int, KVCachePool, StepInputs, tuple[Tensor, Tensor] | None], Attend]


class _Context(NamedTuple):
    """Cache slots that new tokens read, and a mask of the slots that each token attends to.

    The mask is None if decodes attend to all slots, or a run (a sequence with several new tokens) is causal.
    Shapes: slots (S, T) and visible (S, 1, T) for S decodes; (1, T) and (1, n, T) for a run.
    """

    slots: Tensor
    visible: Tensor | None


#: Contexts of the sequences with one new token, and of each longer run.
_StepContexts = tuple[_Context | None, list[_Context]]


def create_attention(
    num_heads: int, pool: KVCachePool, inputs: StepInputs, rotation: tuple[Tensor, Tensor] | None
) -> Attend:
    """Create the attention of a step, computed in the dtype of the pool."""
    num_kv_heads, head_dim = pool.blocks(0)[0].shape[2:]
    num_decodes = inputs.num_decodes
    contexts = Contexts(inputs, pool)

    def attend(layer: int, qkv: Tensor, heads: Heads = PLAIN) -> Tensor:
        by_head = qkv.to(pool.dtype).view(qkv.shape[0], -1, head_dim)
        query, key, value = by_head.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        query, key = heads.normed(query, key)
        if heads.rotates and rotation is not None:
            cos, sin = (x[:, heads.rope : heads.rope + 1] for x in rotation)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        pool.write(layer, inputs.slots, key, value)
        decodes, parts = contexts.of(heads)[0], []
        if decodes is not None:
            keys, values = pool.read(layer, decodes.slots)
            parts.append(_attend(query[:num_decodes, None], keys, values, decodes.visible, heads))
        parts += contexts.attend_runs(layer, query, key, value, heads)
        outputs = [part.reshape(-1, num_heads * head_dim) for part in parts]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(qkv.dtype)

    return attend


class Contexts:
    """The contexts of a step's sequences, computed once for each kind of mask."""

    def __init__(self, inputs: StepInputs, pool: KVCachePool) -> None:
        self._inputs, self._pool = inputs, pool
        self._found: dict[tuple[int | None, int | None, bool], _StepContexts] = {}

    def of(self, heads: Heads) -> _StepContexts:
        form = (heads.window, heads.chunk, heads.is_bidirectional)
        if form not in self._found:
            self._found[form] = _find_contexts(self._inputs, self._pool.block_size, heads)
        return self._found[form]

    def attend_runs(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, heads: Heads
    ) -> list[Tensor]:
        """Attention of the sequences with several new tokens, whose keys and values are in the cache already.

        Shapes: query (N, H, D), key and value (N, K, D); returns (1, n, H, D) of each.
        """
        parts, runs = [], self.of(heads)[1]
        for sequence, context in zip(
            self._inputs.sequences[self._inputs.num_decodes :], runs, strict=True
        ):
            rows = slice(sequence.start, sequence.stop)
            kept = key[None, rows], value[None, rows]
            if sequence.num_computed:
                kept = self._pool.read(layer, context.slots)
            parts.append(_attend(query[None, rows], *kept, context.visible, heads))
        return parts


def _find_contexts(inputs: StepInputs, block_size: int, heads: Heads) -> _StepContexts:
    first, last = torch.zeros_like(inputs.indices), inputs.indices
    if heads.window is not None:
        first = (last - heads.window + 1).clamp(min=0)
    if heads.chunk is not None:
        first = torch.maximum(first, last - last % heads.chunk)
    for span in inputs.bidirectional if heads.is_bidirectional else ():
        if last is inputs.indices:
            last = last.clone()
        last[span.start : span.stop] = span.last
        if span.ignores_window:
            first[span.start : span.stop] = 0

    def find_slots(sequences: slice, indices: Tensor) -> Tensor:
        blocks = inputs.block_tables[sequences].gather(1, indices // block_size)
        return blocks * block_size + indices % block_size

    decodes, num = None, inputs.num_decodes
    if num:
        first_seen, last_seen = first[:num, None], last[:num, None]
        count = max(1, int((last_seen - first_seen).max()) + 1)
        indices = first_seen + torch.arange(count, device=first.device)
        visible = indices <= last_seen
        # masked positions read the newest visible token, because unused slots of a block can contain NaN
        slots = find_slots(slice(num), indices.minimum(last_seen).clamp(min=0))
        decodes = _Context(slots, None if bool(visible.all()) else visible[:, None])
    runs = []
    for number, sequence in enumerate(inputs.sequences[num:], num):
        rows = slice(sequence.start, sequence.stop)
        start = int(first[rows].min()) if sequence.num_computed else 0
        indices = torch.arange(start, sequence.num_context, device=first.device)
        visible = (indices >= first[rows, None]) & (indices <= last[rows, None])
        is_causal = heads.is_plain(inputs) and heads.window is None and not sequence.num_computed
        slots = find_slots(slice(number, number + 1), indices[None])
        runs.append(_Context(slots, None if is_causal else visible[None]))
    return decodes, runs


def _attend(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, heads: Heads
) -> Tensor:
    """Shapes: query (S, n, H, D), key and value (S, T, K, D), visible (S, n, T)."""
    num_new, num_kv_heads = query.shape[1], key.shape[2]
    if heads.softcap is None and heads.sinks is None:
        if num_new == 1:
            # treat the query heads of a key head as several queries, so that keys are not repeated
            query = query.view(len(query), num_kv_heads, -1, query.shape[3]).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            attn_mask=None if visible is None else visible[:, None],
            is_causal=visible is None and num_new > 1,
            scale=heads.scale,
            enable_gqa=query.shape[2] != num_kv_heads,
        )
        return out if num_new == 1 else out.transpose(1, 2)
    grouped = query.unflatten(2, (num_kv_heads, -1))
    scale = query.shape[-1] ** -0.5 if heads.scale is None else heads.scale
    scores = torch.einsum("snkgd,stkd->skgnt", grouped, key) * scale
    if heads.softcap is not None:
        scores = torch.tanh(scores / heads.softcap) * heads.softcap
    if visible is None and num_new > 1:
        visible = torch.ones(1, num_new, key.shape[1], dtype=torch.bool, device=key.device).tril()
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    if heads.sinks is not None:
        sinks = heads.sinks.to(scores.dtype).view(1, num_kv_heads, -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return torch.einsum("skgnt,stkd->snkgd", weights[..., : key.shape[1]], value)
