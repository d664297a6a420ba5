"""Pictures on their way through tower and projector, in parts: beside running streams nobody waits for a whole one.

Used by the picture encoder; `Llava.encode_images` does the same at once. It must not know caches or clocks.
"""

from collections.abc import Generator, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engines.torch_backend.models.llava import Llava


class EncodingRun:
    """`advance` until it `is_done`; then `features` are there. A part is one product of so many tokens."""

    def __init__(self, model: Llava, pixels: Tensor, tokens_per_part: int) -> None:
        """Shapes: pixels (B, 3, size, size)."""
        self.is_done = False
        self.features = torch.empty(0)  #: (B, P, C) in the end
        self._model = model
        self._size = tokens_per_part
        self._parts = self._compute(pixels)
        next(self._parts)

    def advance(self) -> None:
        """Compute the next part."""
        self.is_done = next(self._parts, self) is self

    # Each generator yields before each of its parts.

    def _compute(self, pixels: Tensor) -> Iterator[None]:
        yield
        tower = self._model.vision_tower
        x = tower.embed(pixels)
        read: dict[int, Tensor] = {}
        for number, block in tower.blocks:
            x = yield from self._attend(block, x)
            x = yield from self._feed(block, x)
            if number in tower.block_numbers:
                read[number] = x
        projected = []
        for piece in tower.select(read).split(self._size, dim=1):
            yield
            projected.append(self._model.multi_modal_projector(piece))
        self.features = torch.cat(projected, dim=1)

    def _attend(self, block: Any, x: Tensor) -> Generator[None, None, Tensor]:
        """A block's attention. Shapes: (B, T, width), kept."""
        attention = block.attn
        inputs = []
        for piece in x.split(self._size, dim=1):
            yield
            normed = block.ln_1(piece)
            inputs.append(
                functional.linear(normed, attention.in_proj_weight, attention.in_proj_bias)
            )
        heads = torch.cat(inputs, dim=1).unflatten(-1, (3, attention.num_heads, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)  # (B, heads, T, head width) each
        outputs = []
        for piece in queries.split(self._size, dim=2):
            yield
            mixed = functional.scaled_dot_product_attention(piece, keys, values)
            outputs.append(attention.out_proj(mixed.transpose(1, 2).flatten(2)))
        return x + torch.cat(outputs, dim=1)

    def _feed(self, block: Any, x: Tensor) -> Generator[None, None, Tensor]:
        """A block's feed-forward part. Shapes: (B, T, width), kept."""
        outputs = []
        for piece in x.split(self._size, dim=1):
            yield
            outputs.append(piece + block.mlp(block.ln_2(piece)))
        return torch.cat(outputs, dim=1)
