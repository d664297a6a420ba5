"""A step's attention with the C++ kernel: rotation, keeping, and all sequences in one call.

Shape letters: N new tokens, R sequences with several of them, H query heads, K key/value heads, D head width.
"""

import ctypes

import torch
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import PLAIN, AttentionPlan, Heads, Span
from engines.torch_backend.models.config import TextConfig
from engines.torch_backend.ops import native
from engines.torch_backend.ops.native.library import (
    FLOAT_KINDS,
    AttentionStruct,
    HeadsStruct,
    Library,
)
from engines.torch_backend.ops.registry import Site
from engines.torch_backend.ops.step_attention.reference import (
    Attend,
    CreateAttention,
    create_attention,
)

_LANES = 8


def build(site: Site) -> CreateAttention:
    """The kernel where it reads such keys and values, else the reference."""
    library = native.load(site.level)

    def create(
        text: TextConfig, pool: KVCachePool, plan: AttentionPlan, rotation: tuple[Tensor, Tensor]
    ) -> Attend:
        if not can_attend(text, pool):
            return create_attention(text, pool, plan, rotation)
        return PagedAttention(library, text, pool, plan, rotation)

    return create


def can_attend(text: TextConfig, pool: KVCachePool) -> bool:
    """Whether the kernel reads these keys and values."""
    return text.head_dim % _LANES == 0 and pool.scales(0) is None


class PagedAttention:
    """One step's, for all layers."""

    def __init__(
        self,
        library: Library,
        text: TextConfig,
        pool: KVCachePool,
        plan: AttentionPlan,
        rotation: tuple[Tensor, Tensor],
    ) -> None:
        """`rotation` as of `RotaryTable.at_all`."""
        self._library = library
        self._pool = pool
        self._num_threads = torch.get_num_threads()
        decodes = plan.spans[: plan.num_decodes]
        # a table of angles after another
        cos, sin = (table.float().transpose(0, 1).contiguous() for table in rotation)
        lengths = torch.tensor([span.num_context for span in decodes], dtype=torch.int64)
        blocks = plan.decode_blocks
        later = plan.spans[plan.num_decodes :]
        runs, run_table = _runs(later, pool.block_size) if later else _NO_RUNS
        self._kept = (
            cos,
            sin,
            lengths,
            blocks,
            plan.slots,
            runs,
            run_table,
        )  # their memory is read
        dtype = pool.blocks(0)[0].dtype
        self._struct = AttentionStruct(
            kind=FLOAT_KINDS[dtype],
            num_heads=text.num_heads,
            num_kv_heads=text.num_kv_heads,
            head_dim=text.head_dim,
            num_tokens=plan.spans[-1].stop,
            num_decodes=plan.num_decodes,
            block_size=pool.block_size,
            table_width=0 if blocks is None else blocks.numel() // plan.num_decodes,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=plan.slots.data_ptr(),
            table=None if blocks is None else blocks.data_ptr(),
            lengths=lengths.data_ptr(),
            num_runs=len(runs),
            run_table_width=run_table.shape[1],
            runs=runs.data_ptr(),
            run_table=run_table.data_ptr(),
        )
        bytes_each = cos.stride(0) * cos.element_size()
        self._angles = [
            (cos.data_ptr() + table * bytes_each, sin.data_ptr() + table * bytes_each)
            for table in range(cos.shape[0])
        ]

    @property
    def address(self) -> int:
        """Of what the kernel reads for all layers."""
        return ctypes.addressof(self._struct)

    def places(self, layer: int) -> tuple[int, int]:
        """Addresses of a layer's kept keys and values."""
        keys, values = self._pool.blocks(layer)
        return keys.data_ptr(), values.data_ptr()

    def __call__(self, layer: int, qkv: Tensor, heads: Heads = PLAIN) -> Tensor:
        """Shapes: qkv (N, (H + 2 K) * D), float32, rotated in place; returns (N, H * D)."""
        form, _kept = _PLAIN if heads is PLAIN else bind_heads(heads)
        self._struct.cos, self._struct.sin = self._angles[heads.rope]
        keys, values = self._pool.blocks(layer)
        out = torch.empty(len(qkv), self._struct.num_heads * self._struct.head_dim)
        self._library.attention(
            ctypes.byref(self._struct),
            ctypes.byref(form),
            keys.data_ptr(),
            values.data_ptr(),
            qkv.data_ptr(),
            out.data_ptr(),
            self._num_threads,
        )
        return out


def bind_heads(heads: Heads) -> tuple[HeadsStruct, list[Tensor]]:
    """As the kernel reads them, and what has to live as long."""
    norms = (heads.query_norm, heads.key_norm)
    gains = [None if norm is None else norm.weight.detach().float().contiguous() for norm in norms]
    query_gain, key_gain = (None if gain is None else gain.data_ptr() for gain in gains)
    eps = next((norm.eps for norm in norms if norm is not None), 0.0)
    struct = HeadsStruct(query_gain, key_gain, heads.window or 0, eps, heads.turns)
    return struct, [gain for gain in gains if gain is not None]


_PLAIN = bind_heads(PLAIN)


def _runs(spans: list[Span], block_size: int) -> tuple[Tensor, Tensor]:
    """Start, new and computed tokens of each, and its blocks. Shapes: (R, 3), (R, blocks of the longest)."""
    runs = [(span.start, span.num_new, span.num_computed) for span in spans]
    num_blocks = [-(-span.num_context // block_size) for span in spans]
    table = torch.zeros(len(spans), max(num_blocks, default=0), dtype=torch.int64)
    for row, span, count in zip(table, spans, num_blocks, strict=True):
        row[:count] = torch.tensor(span.block_ids[:count])
    return torch.tensor(runs, dtype=torch.int64).view(-1, 3), table


_NO_RUNS = _runs([], 1)
