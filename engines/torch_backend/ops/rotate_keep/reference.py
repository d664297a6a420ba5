"""Shape letters: N tokens, H query heads, K key/value heads, D head width."""

from collections.abc import Callable

from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.attention import PLAIN, Heads
from engines.torch_backend.layers.rotary import RotaryTable, rotate

RotateKeep = Callable[
    [Tensor, RotaryTable, Tensor, Tensor, KVCachePool, int, Heads], tuple[Tensor, Tensor, Tensor]
]


def rotate_keep(
    qkv: Tensor,
    rotary: RotaryTable,
    positions: Tensor,
    slots: Tensor,
    pool: KVCachePool,
    layer: int,
    heads: Heads = PLAIN,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised and turned queries; such keys and values as they will be read; the latter two are kept in the pool.

    Shapes: qkv (N, (H + 2 K) D), positions (N,) or (R, N), slots (N,); returns (N, H, D) and two (N, K, D).
    """
    num_kv_heads, head_dim = pool.blocks(layer)[0].shape[2:]
    by_head = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = by_head.shape[1] - 2 * num_kv_heads
    query, key, value = by_head.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    query, key = heads.normed(query, key)
    if heads.turns:
        rotation = rotary.at(positions)
        query, key = rotate(query, *rotation), rotate(key, *rotation)
    key, value = pool.write(layer, slots, key, value)
    return query, key, value
