"""Images on their way through tower and projector, in parts: beside running streams nobody waits for a whole one.

Used by the image encoder.

Shape letters: B images, P patches, C channels.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from engines.torch_backend.models.registry import FamilyModel
from engines.torch_backend.models.vision import joined


class EncodingRun:
    """`advance` until it `is_done`; then `features` are there. A part is one product of so many tokens."""

    def __init__(self, model: FamilyModel, pixels: Tensor, tokens_per_part: int) -> None:
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

    def _compute(self, pixels: Tensor) -> Iterator[None]:
        """Yields before each part."""
        features = yield from self._model.vision_tower.in_parts(pixels, self._size)
        projected = []
        for piece in features.split(self._size, dim=1):
            yield
            projected.append(self._model.multi_modal_projector(piece))
        self.features = joined(projected).to(pixels.dtype)
