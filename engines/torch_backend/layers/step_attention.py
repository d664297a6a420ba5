"""A step's attention by the operators of its device, for all layers.

Shape letters: N new tokens, H query heads, K key/value heads, D head width.
"""

import torch
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import PLAIN, AttentionPlan, Heads, attend_runs
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.layers.visible_attention import Windows
from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.ops.varlen_attention.reference import Runs


class StepAttention:
    """On a GPU: sequences with one new token by the decode operator, longer runs by varlen attention."""

    def __init__(
        self,
        ops: Ops,
        pool: KVCachePool,
        plan: AttentionPlan,
        rotary: RotaryTable,
        positions: Tensor,
    ) -> None:
        """Without a candidate for varlen attention, runs are computed one after another."""
        self._rotate_keep = ops["rotate_keep"]
        self._attend_decodes = ops["decode_attention"]
        self._varlen = ops["varlen_attention"] if ops.uses("varlen_attention") else None
        self._pool = pool
        self._plan = plan
        self._rotary = rotary
        self._positions = positions
        self._windows = Windows(plan, pool.block_size)
        device = plan.slots.device
        decodes = plan.spans[: plan.num_decodes]
        if plan.decode_blocks is not None:
            # the type that graphs use: the kernel is compiled once
            self._tables = plan.decode_blocks.view(len(decodes), -1).to(torch.int32)
            self._lengths = torch.tensor([span.num_context for span in decodes]).to(device)
        longer = plan.spans[plan.num_decodes :]
        if longer:
            self._runs = Runs.create([(s.num_new, s.num_context) for s in longer], device)

    def __call__(self, layer: int, qkv: Tensor, heads: Heads = PLAIN) -> Tensor:
        """Shapes: qkv (N, (H + 2 K) D); returns (N, H * D)."""
        query, key, value = self._rotate_keep(
            qkv, self._rotary.of_rope(heads.rope), self._positions, self._plan.slots, self._pool,
            layer, heads,
        )  # fmt: skip
        if heads.window is not None and self._varlen is None:
            return self._windows.attend(self._pool, layer, heads.window, query, key, value)
        num_decodes = self._plan.num_decodes
        parts = []
        if num_decodes:
            head = query[:num_decodes]
            tables, lengths = self._tables, self._lengths
            parts.append(
                self._attend_decodes(self._pool, layer, head, tables, lengths, heads.window)
            )
        if num_decodes < len(self._plan.spans):
            parts.append(self._attend_runs(layer, query, key, value, heads.window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_runs(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        if self._varlen is None:
            return attend_runs(self._pool, self._plan, layer, query, key, value)
        keys, values = self._contexts(layer, key, value)
        runs = query[self._plan.num_decodes :]
        return self._varlen(runs, keys, values, self._runs, window).flatten(1)

    def _contexts(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all runs' contexts, one after another; copied only if some are of earlier steps."""
        plan = self._plan
        if not plan.continuations:
            return key[plan.num_decodes :], value[plan.num_decodes :]
        parts = []
        for place in range(plan.num_decodes, len(plan.spans)):
            span, continuation = plan.spans[place], plan.continuations.get(place)
            if continuation is None:
                parts.append((key[span.start : span.stop], value[span.start : span.stop]))
            else:
                kept = self._pool.read(layer, continuation.blocks)
                parts.append(tuple(x[: span.num_context] for x in kept))
        keys, values = zip(*parts, strict=True)
        return torch.cat(keys), torch.cat(values)
