"""A KV pool of 8-bit integers: half of bfloat16's bytes to keep and to read, and nearly its answers.

Made by the runner where `kv_dtype` says so. Every token's key and value of every head is scaled by its own
largest number, so that a token is stored alike in whatever step and company it came, and all ways to an answer
still agree.

Shape letters: N tokens, M blocks, K key/value heads, D head width.
"""

import torch
from torch import Tensor

from engines.torch_backend.kv_cache import SCALE_DTYPE, KVCachePool, KVShape

_LARGEST = 127.0


class Int8KVCachePool(KVCachePool):
    """Integers within -127..127, and float32 scales for each layer, token and head."""

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`dtype` is that of what is written and read."""
        super().__init__(shape, num_blocks, block_size, torch.int8, device)
        self._dtype = dtype
        self._scales = torch.empty(self.data.shape[:-1], dtype=SCALE_DTYPE, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers, with the scales."""
        return self.data.nbytes + self._scales.nbytes

    def scales(self, layer: int) -> Tensor:
        """What a layer's integers are multiplied by. Shapes: (2, blocks, block_size, K)."""
        return self._scales[layer]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep new tokens' keys and values. Returns them as they will be read.

        Shapes: slots (N,); key, value (N, K, D), kept.
        """
        stored = []
        for place, x in enumerate((key, value)):
            integers, scale = quantize(x)
            self._slots[layer][place].index_copy_(0, slots, integers)
            self._scales[layer, place].flatten(0, 1).index_copy_(0, slots, scale)
            stored.append(self._dequantize(integers, scale))
        return stored[0], stored[1]

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of whole blocks, in the order named. Shapes: blocks (M,); returns two (M * slots, K, D)."""
        keys, values = super().read(layer, blocks)
        scales = self._scales[layer].index_select(1, blocks).flatten(1, 2)
        return self._dequantize(keys, scales[0]), self._dequantize(values, scales[1])

    def clear(self, blocks: Tensor) -> None:
        """Zero blocks in every layer. Shapes: blocks (M,)."""
        super().clear(blocks)
        self._scales.index_fill_(2, blocks, 0)

    def _dequantize(self, integers: Tensor, scale: Tensor) -> Tensor:
        return (integers.to(SCALE_DTYPE) * scale.unsqueeze(-1)).to(self._dtype)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers, and what they are to be multiplied by. Shapes: (N, K, D); returns (N, K, D), (N, K)."""
    x = x.to(SCALE_DTYPE)
    scale = (x.abs().amax(-1) / _LARGEST).clamp(min=torch.finfo(SCALE_DTYPE).tiny)
    # halves go up, which every device can do
    return (x / scale.unsqueeze(-1) + 0.5).floor().to(torch.int8), scale
