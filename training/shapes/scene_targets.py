"""What every patch of an image should know of the scene; used in training only.

A vision transformer learns slowly from the answers of a language model alone. Asking every patch what
stands in its own cell of the three by three places, and what the whole scene is like, teaches it directly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from training.shapes.world import PLACES


@dataclass(frozen=True, slots=True)
class SceneTargets:
    """What the heads should say for N images of P patches.

    Shapes: class indices, int64 (N, P): `kind` (0 is none), `color`, `size` and `place` of each patch's own
    cell; `background` and `count`, the same for every patch of an image.
    """

    kind: Tensor
    color: Tensor
    size: Tensor
    place: Tensor
    background: Tensor
    count: Tensor

    @classmethod
    def of(cls, codes: Tensor, patches_per_side: int) -> "SceneTargets":
        """Targets of images whose scenes are encoded as in `gallery.encode`. Shapes: uint8 (N, CODE_LENGTH)."""
        codes = codes.long()
        place = place_of_patches(patches_per_side).to(codes.device).expand(len(codes), -1)
        kind, color, size = codes[:, 1:].view(-1, len(PLACES), 3).unbind(-1)
        background = codes[:, :1].expand_as(place)
        count = (kind > 0).sum(1, keepdim=True).expand_as(place)
        kind, color, size = (cells.gather(1, place) for cells in (kind, color, size))
        return cls(
            kind,
            (color - 1).clamp_min(0),
            (size - 1).clamp_min(0),
            place,
            background,
            count,
        )


def place_of_patches(patches_per_side: int) -> Tensor:
    """The index in PLACES of the cell that holds each patch's center. Shapes: int64 (P,)."""
    cell = ((torch.arange(patches_per_side) + 0.5) * 3 / patches_per_side).long()
    return (3 * cell[:, None] + cell[None, :]).flatten()
