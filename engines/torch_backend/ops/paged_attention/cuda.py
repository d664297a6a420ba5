"""Paged attention on a GPU: Triton kernels rotate, write and decode; flash attention computes other sequences.

`torch.nn.attention.varlen` is new: torch 2.11 lacks grouped heads, and the interface can change. If it is missing or
returns wrong results, the reference computes steps in which a sequence has several new tokens.
"""

import inspect
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.ops.paged_attention.reference import (
    PLAIN,
    Attend,
    CreateAttention,
    Heads,
    create_attention,
)
from engines.torch_backend.ops.registry import Candidate, Site
from engines.torch_backend.ops.triton_kernel import lacks
from engines.torch_backend.step import StepInputs


def _build(site: Site, varlen_attn: Any = None) -> CreateAttention:
    from engines.torch_backend.ops.paged_attention.rotate import (  # noqa: PLC0415 - for GPUs only
        rotate_and_write,
    )
    from engines.torch_backend.ops.paged_attention.triton import attend_decodes  # noqa: PLC0415

    return partial(CudaAttention, (rotate_and_write, attend_decodes, varlen_attn))


def _build_with_varlen(site: Site) -> CreateAttention:
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - for GPUs only

    return _build(site, varlen_attn)


CANDIDATES = (
    Candidate("triton_varlen", _build_with_varlen, lacks),
    Candidate("triton", _build, lacks),
)


class CudaAttention:
    def __init__(
        self,
        kernels: tuple[Any, Any, Any],
        num_heads: int,
        pool: KVCachePool,
        inputs: StepInputs,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._rotate_and_write, self._decode, self._varlen_attn = kernels
        self._given = (num_heads, pool, inputs, rotation)
        self._has_runs = inputs.num_decodes < len(inputs.sequences)

    def __call__(self, layer: int, qkv: Tensor, heads: Heads = PLAIN) -> Tensor:
        """Shapes: qkv (N, (H + 2 K) D); returns (N, H D)."""
        _, pool, inputs, rotation = self._given
        lacks_runs = self._has_runs and self._varlen_attn is None
        if lacks_runs or heads.scale is not None or not heads.is_plain(inputs):
            return self._reference(layer, qkv, heads)
        query, key, value = self._rotate_and_write(qkv, rotation, inputs.slots, pool, layer, heads)
        num_decodes, parts = inputs.num_decodes, []
        if num_decodes:
            tables, lengths = inputs.block_tables[:num_decodes], inputs.lengths[:num_decodes]
            decodes = query[:num_decodes]
            parts.append(self._decode(pool, layer, decodes, tables, lengths, heads.window))
        if self._has_runs:
            query, key, value = (x[num_decodes:] for x in (query, key, value))
            parts.append(self._attend_runs(layer, query, key, value, heads.window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @cached_property
    def _reference(self) -> Attend:
        return create_attention(*self._given)

    @cached_property
    def _runs(self) -> tuple[tuple[Any, ...], Tensor | None]:
        """Offsets and maximum lengths for `varlen_attn`; the contexts' slots, or None if all tokens are new."""
        _, pool, inputs, _ = self._given
        runs = inputs.sequences[inputs.num_decodes :]
        ends = torch.tensor([(0, 0), *((run.num_new, run.num_context) for run in runs)])
        ends = ends.cumsum(0).to(inputs.slots.device, torch.int32)
        offsets = (ends[:, 0].contiguous(), ends[:, 1].contiguous())
        most = max(run.num_new for run in runs), max(run.num_context for run in runs)
        if not any(run.num_computed for run in runs):
            return (*offsets, *most), None
        indices = torch.arange(most[1], device=ends.device)
        blocks = inputs.block_tables[inputs.num_decodes :, indices // pool.block_size]
        slots = blocks * pool.block_size + indices % pool.block_size
        contexts = [row[: run.num_context] for row, run in zip(slots, runs, strict=True)]
        return (*offsets, *most), torch.cat(contexts)[None]

    def _attend_runs(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> Tensor:
        """Shapes: query (n, H, D), key and value (n, K, D), already in the cache; returns (n, H D)."""
        ends, slots = self._runs
        if slots is not None:
            key, value = (x[0] for x in self._given[1].read(layer, slots))
        group = query.shape[1] // key.shape[1]
        options = {}
        if group > 1 and "enable_gqa" in inspect.signature(self._varlen_attn).parameters:
            options = {"enable_gqa": True}
        elif group > 1:
            key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        window_size = (-1 if window is None else window - 1, 0)
        out = self._varlen_attn(query, key, value, *ends, window_size=window_size, **options)
        return out.flatten(1)
