"""Shape letters: N new tokens, H query heads, K key/value heads, D head width."""

from collections.abc import Callable

from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import AttentionPlan, paged_attention
from engines.torch_backend.layers.rotary import rotate
from engines.torch_backend.models.config import TextConfig

#: (layer, qkv (N, (H + 2 K) D)) to (N, H D): rotates, keeps keys and values, and attends.
Attend = Callable[[int, Tensor], Tensor]
CreateAttention = Callable[[TextConfig, KVCachePool, AttentionPlan, tuple[Tensor, Tensor]], Attend]


def create_attention(
    text: TextConfig, pool: KVCachePool, plan: AttentionPlan, rotation: tuple[Tensor, Tensor]
) -> Attend:
    """One step's, for all layers, in the precision of `rotation`, which is as of `RotaryTable.at`."""
    sizes = [text.num_heads, text.num_kv_heads, text.num_kv_heads]
    dtype = rotation[0].dtype

    def attend(layer: int, qkv: Tensor) -> Tensor:
        by_head = qkv.to(dtype).view(qkv.shape[0], sum(sizes), text.head_dim)
        query, key, value = by_head.split(sizes, dim=1)
        query, key = rotate(query, *rotation), rotate(key, *rotation)
        return paged_attention(pool, plan, layer, query, key, value).to(qkv.dtype)

    return attend
