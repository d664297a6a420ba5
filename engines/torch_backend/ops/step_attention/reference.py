"""Shape letters: N new tokens, H query heads, K key/value heads, D head width."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import PLAIN, AttentionPlan, Heads, paged_attention
from engines.torch_backend.layers.rotary import rotate
from engines.torch_backend.layers.visible_attention import Windows
from engines.torch_backend.models.config import TextConfig


class Attend(Protocol):
    """Normalises heads, rotates, keeps keys and values, and attends."""

    def __call__(self, layer: int, qkv: Tensor, heads: Heads = PLAIN) -> Tensor:
        """Shapes: qkv (N, (H + 2 K) D), which may be changed; returns (N, H D)."""
        ...


CreateAttention = Callable[[TextConfig, KVCachePool, AttentionPlan, tuple[Tensor, Tensor]], Attend]


def create_attention(
    text: TextConfig, pool: KVCachePool, plan: AttentionPlan, rotation: tuple[Tensor, Tensor]
) -> Attend:
    """One step's, for all layers, in the precision of `rotation`, which is as of `RotaryTable.at_all`."""
    sizes = [text.num_heads, text.num_kv_heads, text.num_kv_heads]
    dtype = rotation[0].dtype
    windows = Windows(plan, pool.block_size)

    def attend(layer: int, qkv: Tensor, heads: Heads = PLAIN) -> Tensor:
        by_head = qkv.to(dtype).view(qkv.shape[0], sum(sizes), text.head_dim)
        query, key, value = by_head.split(sizes, dim=1)
        query, key = heads.normed(query, key)
        if heads.turns:
            cos, sin = (x[:, heads.rope : heads.rope + 1] for x in rotation)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if heads.window is None:
            return paged_attention(pool, plan, layer, query, key, value).to(qkv.dtype)
        return windows.attend(pool, layer, heads.window, query, key, value).to(qkv.dtype)

    return attend
