"""The paged KV cache: block pools and their size.

The runner owns the pools, attention reads and writes them, and the scheduler assigns blocks to sequences.

Shape letters: K key/value heads, D head width. A block has `block_size` slots of one token each; a slot's number is
`block * block_size + offset`. Units: bytes, tokens, blocks.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engines.base import EngineStartError
from engines.torch_backend.models.config import KVShape, TextLimits
from engines.torch_backend.settings import TorchSettings

#: Default size of the pool as a fraction of the memory that is free after loading.
FREE_MEMORY_RATIO = {"cpu": 0.4, "cuda": 0.85}


def bytes_per_block(shape: KVShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of every layer."""
    num_vectors = 2 * shape.num_layers * block_size * shape.num_kv_heads
    return num_vectors * shape.head_dim * dtype.itemsize


def plan_kv_cache(
    text: TextLimits,
    engine: TorchSettings,
    dtype: torch.dtype,
    free_bytes: int,
    device_type: str,
    shapes: Sequence[KVShape],
) -> tuple[int, int]:
    """Number of blocks of each pool, and the maximum sequence length.

    `num_kv_blocks` or `kv_cache_bytes` sets the number of blocks; by default, a full batch fits, if memory allows.
    If `max_model_len` is not set, the blocks limit the length. Raises: EngineStartError for sizes that do not fit.
    """
    if (engine.max_model_len or 0) > text.max_position_embeddings:
        raise EngineStartError(
            f"max_model_len {engine.max_model_len} exceeds the model's context; set at most "
            f"{text.max_position_embeddings} tokens"
        )
    block_bytes = sum(bytes_per_block(shape, engine.block_size, dtype) for shape in shapes)
    wanted_len = engine.max_model_len or text.max_position_embeddings
    blocks_per_sequence = math.ceil(wanted_len / engine.block_size)
    if engine.num_kv_blocks is not None:
        num_blocks = engine.num_kv_blocks
    elif engine.kv_cache_bytes is not None:
        num_blocks = engine.kv_cache_bytes // block_bytes
    else:
        room = int(free_bytes * FREE_MEMORY_RATIO[device_type]) // block_bytes
        num_blocks = min(room, engine.max_num_seqs * blocks_per_sequence)
    if num_blocks * block_bytes > free_bytes:
        raise EngineStartError(
            f"{num_blocks} KV blocks of {block_bytes} bytes need {num_blocks * block_bytes} bytes, but "
            f"{free_bytes} bytes are free. Lower kv_cache_bytes, or leave it unset."
        )
    max_model_len = min(wanted_len, num_blocks * engine.block_size)
    if max_model_len < 2 or (engine.max_model_len is not None and max_model_len < wanted_len):
        raise EngineStartError(
            f"one sequence of {wanted_len} tokens needs {blocks_per_sequence} KV blocks "
            f"({blocks_per_sequence * block_bytes} bytes), but the KV cache has {num_blocks} blocks "
            f"({num_blocks * engine.block_size} tokens). Lower max_model_len or raise kv_cache_bytes."
        )
    return num_blocks, max_model_len


class KVCachePool:
    """Keys and values of every layer, in blocks. Unwritten slots are undefined."""

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.head_dim = shape.head_dim
        self.dtype = dtype
        sizes = (shape.num_layers, 2, num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        #: Shapes: (layers, 2, blocks, block_size, K, D)
        self.data = torch.empty(sizes, dtype=dtype, device=device)
        # created once, because every step needs these views of every layer
        self._blocks = [(layer[0], layer[1]) for layer in self.data]
        self._slots = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self._blocks]

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Stored keys and values of a layer. Shapes: two (blocks, block_size, K, D)."""
        return self._blocks[layer]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store keys and values of new tokens. Shapes: slots (N,); key, value (N, K, D)."""
        for target, x in zip(self._slots[layer], (key, value), strict=True):
            target.index_copy_(0, slots, x)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copy keys and values of slots. Shapes: slots (S, T); returns two (S, T, K, D)."""
        flat = slots.flatten()
        keys, values = (
            x.index_select(0, flat).view(*slots.shape, *x.shape[1:]) for x in self._slots[layer]
        )
        return keys, values
