"""What happens between the matrix products of a decoder layer, in plain torch.

Used by `fused_decoder`. These are the reference implementations that every GPU kernel is compared with, and what serves where a
kernel is missing, wrong or switched off. Nothing here waits for the device or looks at a number on the host, so
that a CUDA graph can hold all of it.

Shape letters: N tokens, S sequences, C hidden width, F inner width, H query heads, K key/value heads, G = H / K,
D head width, T tokens of the longest context that a block table can name.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.rotary import RotaryTable, rotate

AddNorm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
RotateKeep = Callable[
    [Tensor, RotaryTable, Tensor, Tensor, KVCachePool, int], tuple[Tensor, Tensor, Tensor]
]
AttendDecodes = Callable[[KVCachePool, int, Tensor, Tensor, Tensor], Tensor]
Multiply = Callable[[Tensor, Tensor, Tensor], Tensor]


def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The stream with `delta` added, and normalised. Shapes: x, delta (N, C), gain (C,); returns two (N, C)."""
    total = x if delta is None else x + delta
    return total, F.rms_norm(total, gain.shape, gain, eps)


def rotate_keep(
    qkv: Tensor,
    rotary: RotaryTable,
    positions: Tensor,
    slots: Tensor,
    pool: KVCachePool,
    layer: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Turned queries; turned keys and values as they will be read; the latter two are kept in the pool.

    Shapes: qkv (N, (H + 2 K) D), positions and slots (N,); returns (N, H, D) and two (N, K, D).
    """
    num_kv_heads, head_dim = pool.blocks(layer)[0].shape[2:]
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    rotation = rotary.at(positions)
    key, value = pool.write(layer, slots, rotate(key, *rotation), value)
    return rotate(query, *rotation), key, value


def gate(gate_up: Tensor) -> Tensor:
    """SiLU of the first half, times the other. Shapes: (N, 2 F); returns (N, F)."""
    left, right = gate_up.chunk(2, dim=1)
    return F.silu(left) * right


def attend_decodes(
    pool: KVCachePool, layer: int, query: Tensor, tables: Tensor, lengths: Tensor
) -> Tensor:
    """One new token of each sequence over its whole context, which the pool holds.

    Nothing beyond a sequence's length is looked at, in whatever state it is; a length of 0 gives zeros.
    Shapes: query (S, H, D), tables (S, blocks), lengths (S,); returns (S, H * D).
    """
    num_sequences, num_heads, head_dim = query.shape
    keys, values = pool.read(layer, tables.flatten())
    num_kv_heads = keys.shape[1]
    by_sequence = (num_sequences, -1, num_kv_heads, head_dim)
    keys, values = keys.view(by_sequence), values.view(by_sequence)
    unseen = torch.arange(keys.shape[1], device=query.device) >= lengths[:, None]  # (S, T)
    values = values.masked_fill(unseen[:, :, None, None], 0)
    grouped = query.view(num_sequences, num_kv_heads, -1, head_dim).float()
    scores = torch.einsum("skgd,stkd->skgt", grouped, keys.float()) / head_dim**0.5
    weights = scores.masked_fill(unseen[:, None, None], -torch.inf).softmax(-1)
    weights = weights.masked_fill(unseen[:, None, None], 0)
    out = torch.einsum("skgt,stkd->skgd", weights, values.float())
    return out.to(query.dtype).reshape(num_sequences, num_heads * head_dim)


def multiply_int8(x: Tensor, integers: Tensor, scale: Tensor) -> Tensor:
    """Shapes: x (M, K), integers (N, K), scale (N,); returns (M, N)."""
    return F.linear(x, integers.to(x.dtype) * scale[:, None])


def multiply_int4(x: Tensor, pairs: Tensor, scale_zero: Tensor) -> Tensor:
    """(integer - 8) * scale + zero are the weights. Shapes: x (M, K), pairs (N, K / 2), scale_zero (G, N, 2)."""
    num_groups, num_outputs, _ = scale_zero.shape
    groups = pairs.view(num_outputs, num_groups, -1)
    integers = torch.cat([groups & 15, groups >> 4], dim=2).to(x.dtype) - 8
    scale, zero = scale_zero.transpose(0, 1).unsqueeze(2).unbind(3)  # (N, G, 1)
    return F.linear(x, (integers * scale + zero).flatten(1))


@dataclass(frozen=True, slots=True)
class DecoderOps:
    """The functions that a decoder uses: these here, or kernels in their place."""

    add_norm: AddNorm = add_norm
    rotate_keep: RotateKeep = rotate_keep
    gate: Callable[[Tensor], Tensor] = gate
    attend_decodes: AttendDecodes = attend_decodes
    multiply_int8: Multiply = multiply_int8
    multiply_int4: Multiply = multiply_int4
