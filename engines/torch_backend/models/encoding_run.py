"""Images on their way through tower and projector, in parts: beside running streams nobody waits for a whole one.

Used by the image encoder. What a part is computed by are `ImageMaps`: of a loaded model, the plain ones here, its
reference implementation. It must not know caches or clocks.

Shape letters: B images, T tokens of a image, t of them in a part, P patches, C channels.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from engines.torch_backend.models.registry import FamilyModel
from engines.torch_backend.models.vision import VisionTower, mix_values, split_heads


class BlockOps(Protocol):
    """What a block of the tower does: to each token by itself, but for `mix`."""

    def project(self, x: Tensor) -> Tensor:
        """Norm; queries, keys and values. Shapes: (B, t, C); returns (B, t, 3 C)."""
        ...

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of some queries to everything. Shapes: as of `mix_values`."""
        ...

    def add_mixed(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The stream with what attention gave. Shapes: (B, t, C), kept."""
        ...

    def add_feed(self, x: Tensor) -> Tensor:
        """The stream after the feed-forward part. Shapes: (B, t, C), kept."""
        ...


class PlainBlock:
    """As the modules compute it."""

    def __init__(self, block: Any) -> None:
        self._block = block

    def project(self, x: Tensor) -> Tensor:
        """Norm; queries, keys and values."""
        return self._block.attn.in_proj(self._block.ln_1(x))

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of some queries to everything."""
        return mix_values(queries, keys, values)

    def add_mixed(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The stream with what attention gave."""
        return x + self._block.attn.out_proj(mixed)

    def add_feed(self, x: Tensor) -> Tensor:
        """The stream after the feed-forward part."""
        return x + self._block.mlp(self._block.ln_2(x))


@dataclass(frozen=True, slots=True)
class VisionOps:
    """What a image goes through. `blocks` are the tower's, in order."""

    tower: VisionTower
    blocks: Sequence[BlockOps]
    projector: Callable[[Tensor], Tensor]


def reference_ops(model: FamilyModel) -> VisionOps:
    """The model's modules."""
    tower = model.vision_tower
    blocks = [PlainBlock(block) for _, block in tower.blocks]
    return VisionOps(tower, blocks, model.multi_modal_projector)


def encode(maps: VisionOps, pixels: Tensor) -> Tensor:
    """Images at once. Shapes: (B, 3, size, size); returns (B, P, C)."""
    run = EncodingRun(maps, pixels, maps.tower.num_tokens)
    while not run.is_done:
        run.advance()
    return run.features


class EncodingRun:
    """`advance` until it `is_done`; then `features` are there. A part is one product of so many tokens."""

    def __init__(self, maps: VisionOps, pixels: Tensor, tokens_per_part: int) -> None:
        """Shapes: pixels (B, 3, size, size)."""
        self.is_done = False
        self.features = torch.empty(0)  #: (B, P, C) in the end
        self._maps = maps
        self._size = tokens_per_part
        self._parts = self._compute(pixels)
        next(self._parts)

    def advance(self) -> None:
        """Compute the next part."""
        self.is_done = next(self._parts, self) is self

    # Each generator yields before each of its parts.

    def _compute(self, pixels: Tensor) -> Iterator[None]:
        yield
        tower = self._maps.tower
        x = tower.embed(pixels)
        read: dict[int, Tensor] = {}
        for number, block in enumerate(self._maps.blocks, start=1):
            x = yield from self._attend(block, x)
            x = yield from self._feed(block, x)
            if number in tower.block_numbers:
                read[number] = x
        projected = []
        for piece in tower.select(read).split(self._size, dim=1):
            yield
            projected.append(self._maps.projector(piece))
        self.features = _joined(projected).to(pixels.dtype)

    def _attend(self, block: BlockOps, x: Tensor) -> Generator[None, None, Tensor]:
        """A block's attention. Shapes: (B, T, C), kept."""
        pieces = x.split(self._size, dim=1)
        projected = []
        for piece in pieces:
            yield
            projected.append(block.project(piece))
        queries, keys, values = split_heads(_joined(projected), self._maps.tower.num_heads)
        outputs = []
        for piece, part in zip(pieces, queries.split(self._size, dim=2), strict=True):
            yield
            outputs.append(block.add_mixed(piece, block.mix(part, keys, values)))
        return _joined(outputs)

    def _feed(self, block: BlockOps, x: Tensor) -> Generator[None, None, Tensor]:
        """A block's feed-forward part. Shapes: (B, T, C), kept."""
        outputs = []
        for piece in x.split(self._size, dim=1):
            yield
            outputs.append(block.add_feed(piece))
        return _joined(outputs)


def _joined(pieces: list[Tensor]) -> Tensor:
    """Pieces along the tokens; a single one is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
