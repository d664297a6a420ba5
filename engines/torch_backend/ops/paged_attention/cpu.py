"""Paged attention by the C++ kernel: rotation, cache writes and all sequences in one call."""

import ctypes
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.ops import native
from engines.torch_backend.ops.native.library import FLOAT_KINDS, STRUCTS, Library
from engines.torch_backend.ops.paged_attention.reference import (
    PLAIN,
    Attend,
    Contexts,
    CreateAttention,
    Heads,
    create_attention,
)
from engines.torch_backend.ops.registry import Site
from engines.torch_backend.step import StepInputs

_LANES = 8


def build(site: Site) -> CreateAttention:
    """The C++ kernel if it supports the widths of keys and values, otherwise the reference."""
    library = native.load(site.level)

    def create(num_heads: int, pool: KVCachePool, *step: Any) -> Attend:
        if pool.head_dim % _LANES:
            return create_attention(num_heads, pool, *step)
        return PagedAttention(library, site.level.min_fused_tokens, num_heads, pool, *step)

    return create


class PagedAttention:
    def __init__(
        self,
        library: Library,
        min_fused_tokens: int,
        num_heads: int,
        pool: KVCachePool,
        inputs: StepInputs,
        rotation: tuple[Tensor, Tensor] | None,
    ) -> None:
        """`min_fused_tokens`: see `CpuLevel`. `rotation`: see `RotaryTable.at_all`; None if no layer rotates."""
        self._library = library
        self._num_threads = torch.get_num_threads()
        self._given = (num_heads, pool, inputs, rotation)
        self._pool, self.inputs = pool, inputs
        # cosines and sines, (tables, N, D); kept, like `inputs`, because the kernel reads their memory
        self._tables = [
            table.float().transpose(0, 1).contiguous() for table in rotation or (torch.empty(1, 1),)
        ]
        keys = pool.blocks(0)[0]
        #: whether torch computes the attention of sequences with several new tokens
        self.is_fused = (
            keys.dtype is torch.bfloat16
            and len(inputs.slots) >= min_fused_tokens
            and max(each.num_new for each in inputs.sequences) >= min_fused_tokens
        )
        self._struct = STRUCTS["Attention"](
            kind=FLOAT_KINDS[keys.dtype],
            num_heads=num_heads,
            num_kv_heads=keys.shape[2],
            head_dim=pool.head_dim,
            num_tokens=len(inputs.slots),
            num_sequences=inputs.num_decodes if self.is_fused else len(inputs.lengths),
            num_decodes=inputs.num_decodes,
            block_size=pool.block_size,
            table_width=inputs.block_tables.shape[1],
            slots=inputs.slots.data_ptr(),
            tables=inputs.block_tables.data_ptr(),
            row_offsets=inputs.row_offsets.data_ptr(),
            lengths=inputs.lengths.data_ptr(),
        )
        cos, sin = self._tables[0], self._tables[-1]
        self._rotations = [(cos[i].data_ptr(), sin[i].data_ptr()) for i in range(len(cos))]
        self._struct.cos, self._struct.sin = self._rotations[0]

    @property
    def address(self) -> int:
        return ctypes.addressof(self._struct)

    def addresses(self, layer: int) -> tuple[int, int]:
        """Addresses of a layer's keys and values."""
        keys, values = self._pool.blocks(layer)
        return keys.data_ptr(), values.data_ptr()

    @cached_property
    def _contexts(self) -> Contexts:
        return Contexts(self.inputs, self._pool)

    @cached_property
    def _reference(self) -> Attend:
        return create_attention(*self._given)

    def __call__(self, layer: int, qkv: Tensor, heads: Heads = PLAIN) -> Tensor:
        """Shapes: qkv (N, (H + 2 K) D), changed in place if it is float32; returns (N, H D)."""
        if heads is not PLAIN and not heads.is_plain(self.inputs):
            return self._reference(layer, qkv, heads)
        struct, _kept = _PLAIN if heads is PLAIN else bind_heads(heads)
        self._struct.cos, self._struct.sin = self._rotations[heads.rope]
        numbers = qkv.float().contiguous()
        out = torch.empty(len(qkv), self._struct.num_heads * self._struct.head_dim)
        self._library.attention(
            ctypes.byref(self._struct),
            ctypes.byref(struct),
            *self.addresses(layer),
            numbers.data_ptr(),
            out.data_ptr(),
            self._num_threads,
        )
        if self.is_fused:  # the kernel rotated and wrote all tokens, but attended only for decodes
            by_head = numbers.to(self._pool.dtype).unflatten(1, (-1, self._struct.head_dim))
            num_kv_heads = self._struct.num_kv_heads
            widths = [self._struct.num_heads, num_kv_heads, num_kv_heads]
            query, key, value = by_head.split(widths, dim=1)
            runs = self._contexts.attend_runs(layer, query, key, value, heads)
            torch.cat([run.flatten(2)[0] for run in runs], out=out[self.inputs.num_decodes :])
        return out.to(qkv.dtype)


def bind_heads(heads: Heads) -> tuple[ctypes.Structure, list[Tensor]]:
    """The kernel's struct, and the tensors that it points to."""
    norms = (heads.query_norm, heads.key_norm)
    gains = [None if norm is None else norm.weight.detach().float().contiguous() for norm in norms]
    query_gain, key_gain = (None if gain is None else gain.data_ptr() for gain in gains)
    eps = next((norm.eps for norm in norms if norm is not None), 0.0)
    form = (heads.window or 0, eps, heads.scale or 0.0, heads.rotates)
    struct = STRUCTS["Heads"](query_gain, key_gain, *form)
    return struct, [gain for gain in gains if gain is not None]


_PLAIN = bind_heads(PLAIN)
