"""A step's attention with the C++ kernel: rotation, keeping, and all sequences with one new token in one call.

Runs of several new tokens, as prompts are, go torch's way. `paged_attention_by_sequence` is the slow twin.

Shape letters: N new tokens, H query heads, K key/value heads, D head width.
"""

import ctypes

import torch
from torch import Tensor

from engines.torch_backend.attention import AttentionPlan, attend_runs
from engines.torch_backend.kernels_cpp.library import FLOAT_KINDS, AttentionStruct, Library
from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.models.config import TextConfig

_LANES = 8


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
        """`rotation` as of `RotaryTable.at`."""
        self._library = library
        self._pool = pool
        self._plan = plan
        self._heads = (text.num_heads, text.num_kv_heads, text.num_kv_heads)
        self._num_threads = torch.get_num_threads()
        decodes = plan.spans[: plan.num_decodes]
        cos, sin = (table.float().contiguous() for table in rotation)
        lengths = torch.tensor([span.num_context for span in decodes], dtype=torch.int64)
        blocks = plan.decode_blocks
        self._kept = (cos, sin, lengths, blocks)  # their memory is read
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
        )

    @property
    def address(self) -> int:
        """Of what the kernel reads for all layers."""
        return ctypes.addressof(self._struct)

    @property
    def is_whole(self) -> bool:
        """Whether the kernel computes all of it."""
        return self._plan.num_decodes == len(self._plan.spans)

    def places(self, layer: int) -> tuple[int, int]:
        """Addresses of a layer's kept keys and values."""
        keys, values = self._pool.blocks(layer)
        return keys.data_ptr(), values.data_ptr()

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """Shapes: qkv (N, (H + 2 K) * D), float32, rotated in place; returns (N, H * D)."""
        keys, values = self._pool.blocks(layer)
        num_heads = self._heads[0]
        head_dim = self._struct.head_dim
        out = torch.empty(qkv.shape[0], num_heads * head_dim)
        self._library.attention(
            ctypes.byref(self._struct),
            keys.data_ptr(),
            values.data_ptr(),
            qkv.data_ptr(),
            out.data_ptr(),
            self._num_threads,
        )
        if not self.is_whole:
            by_head = qkv.view(qkv.shape[0], -1, head_dim).to(keys.dtype)
            query, key, value = by_head.split(self._heads, dim=1)
            runs = attend_runs(self._pool, self._plan, layer, query, key, value)
            out[self._plan.num_decodes :] = runs
        return out
