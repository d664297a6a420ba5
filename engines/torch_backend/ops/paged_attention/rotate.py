"""Normalise and rotate queries and keys, and write keys and values to the paged cache, in one launch.

Queries, keys and values are read from the output of the fused QKV projection.

Shape letters: N tokens, H query heads, K key/value heads, D head width.
"""

# pyright: reportCallIssue=false
# The launcher accepts `num_warps` and `num_stages` besides the kernel's arguments.
import triton
import triton.language as tl
from torch import Tensor

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.ops.paged_attention.reference import Heads


@triton.jit
def _gain(query_gain, key_gain, d, inside, is_query):
    of_query = tl.load(query_gain + d, mask=inside & is_query, other=0.0).to(tl.float32)
    of_key = tl.load(key_gain + d, mask=inside & (is_query == 0), other=0.0).to(tl.float32)
    return of_query + of_key


@triton.jit
def _rotate_and_write_kernel(
    qkv,  # (N, (H + 2 K) D)
    cosines,  # (N, D), rows `table_stride` apart
    sines,  # (N, D), rows `table_stride` apart, signed
    table_stride,
    slots,  # (N,)
    query_out,  # (N, H, D)
    key_out,  # (N, K, D)
    value_out,  # (N, K, D)
    key_cache,  # (slots, K, D)
    value_cache,  # (slots, K, D)
    query_gain,  # (D,)
    key_gain,  # (D,)
    eps,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """A program rotates one head of one token; for a key it also writes the key and its value to the cache."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    row = qkv + token * (H + 2 * K) * D
    dtype = query_out.dtype.element_ty
    x = tl.load(row + head * D + d, mask=inside, other=0.0).to(tl.float32)
    rolled = tl.load(row + head * D + (d + D // 2) % D, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORMS:
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + eps)
        x = (x * scale * _gain(query_gain, key_gain, d, inside, head < H)).to(dtype).to(tl.float32)
        gain = _gain(query_gain, key_gain, (d + D // 2) % D, inside, head < H)
        rolled = (rolled * scale * gain).to(dtype).to(tl.float32)
    rotated = x.to(dtype)
    if ROTATES:
        angles = token * table_stride + d
        cos = tl.load(cosines + angles, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sines + angles, mask=inside, other=0.0).to(tl.float32)
        rotated = ((x * cos).to(dtype).to(tl.float32) + rolled * sin).to(dtype)
    if head < H:
        tl.store(query_out + (token * H + head) * D + d, rotated, mask=inside)
    else:
        kv_head = head - H
        cell = tl.load(slots + token).to(tl.int64) * K + kv_head
        out = (token * K + kv_head) * D
        value = tl.load(row + (head + K) * D + d, mask=inside, other=0.0).to(tl.float32)
        tl.store(key_cache + cell * D + d, rotated.to(key_cache.dtype.element_ty), mask=inside)
        tl.store(value_cache + cell * D + d, value.to(value_cache.dtype.element_ty), mask=inside)
        tl.store(key_out + out + d, rotated, mask=inside)
        tl.store(value_out + out + d, value.to(dtype), mask=inside)


def rotate_and_write(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    pool: KVCachePool,
    layer: int,
    heads: Heads,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised and rotated queries; keys and values as stored.

    Shapes: qkv (N, (H + 2 K) D), rotation two (N, tables, D), slots (N,); returns (N, H, D) and two (N, K, D).
    """
    keys, values = pool.blocks(layer)
    _, _, num_kv_heads, head_dim = keys.shape
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    key, value = (qkv.new_empty(num_tokens, num_kv_heads, head_dim) for _ in range(2))
    norms = (heads.query_norm, heads.key_norm)
    assert (norms[0] is None) == (norms[1] is None), "queries and keys are normalised together"
    gains = [qkv if norm is None else norm.weight for norm in norms]
    cos, sin = (qkv, qkv) if rotation is None else (x[:, heads.rope] for x in rotation)
    _rotate_and_write_kernel[(num_tokens, num_heads + num_kv_heads)](
        qkv.contiguous(),
        cos,
        sin,
        cos.stride(0),
        slots,
        query,
        key,
        value,
        keys,
        values,
        *gains,
        0.0 if heads.query_norm is None else heads.query_norm.eps,
        H=num_heads,
        K=num_kv_heads,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        HAS_NORMS=heads.query_norm is not None,
        ROTATES=heads.rotates and rotation is not None,
        num_warps=1,
    )
    return query, key, value
