"""What every patch of an image should know of the scene; used in training only.

A vision transformer learns slowly from the answers of a language model alone. Asking every patch what
stands in its own cell of the three by three places, and what the whole scene is like, teaches it directly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from training.shapes.world import PLACES

SILHOUETTE_SIZE = 4  # parts of a patch along each side
FOREGROUND_LEVELS = 45  # of 255 in some channel, by which a shape differs from the background


@dataclass(frozen=True, slots=True)
class SceneTargets:
    """What the heads should say for N images of P patches.

    Shapes: class indices, int64 (N, P): `kind` (0 is none), `color`, `size` and `place` of each patch's own
    cell; `background` and `count`, the same for every patch of an image. `silhouette`, float
    (N, P, SILHOUETTE_SIZE ** 2): how much of each part of a patch is covered by a shape, 0 to 1.
    """

    kind: Tensor
    color: Tensor
    size: Tensor
    place: Tensor
    background: Tensor
    count: Tensor
    silhouette: Tensor

    @classmethod
    def of(cls, images: Tensor | None, codes: Tensor, patches_per_side: int) -> "SceneTargets":
        """Targets of images whose scenes are encoded as in `gallery.encode`; without images, no silhouettes.

        Shapes: uint8 (N, size, size, 3) and uint8 (N, CODE_LENGTH).
        """
        codes = codes.long()
        place = place_of_patches(patches_per_side).to(codes.device).expand(len(codes), -1)
        kind, color, size = codes[:, 1:].view(-1, len(PLACES), 3).unbind(-1)
        background = codes[:, :1].expand_as(place)
        count = (kind > 0).sum(1, keepdim=True).expand_as(place)
        kind, color, size = (cells.gather(1, place) for cells in (kind, color, size))
        silhouette = codes.new_zeros(0) if images is None else silhouettes(images, patches_per_side)
        return cls(
            kind,
            (color - 1).clamp_min(0),
            (size - 1).clamp_min(0),
            place,
            background,
            count,
            silhouette,
        )


def silhouettes(images: Tensor, patches_per_side: int) -> Tensor:
    """Where an image differs from its background, which is its median color.

    Shapes: uint8 (N, size, size, 3) in, float (N, P, SILHOUETTE_SIZE ** 2) out.
    """
    levels = images.float()
    median = levels.flatten(1, 2).median(1).values[:, None, None]
    differs = ((levels - median).abs().amax(-1) > FOREGROUND_LEVELS).float()
    parts = F.adaptive_avg_pool2d(differs[:, None], patches_per_side * SILHOUETTE_SIZE)
    parts = parts.unflatten(2, (patches_per_side, -1)).unflatten(4, (patches_per_side, -1))
    return parts.transpose(3, 4).reshape(len(images), patches_per_side**2, SILHOUETTE_SIZE**2)


def place_of_patches(patches_per_side: int) -> Tensor:
    """The index in PLACES of the cell that holds each patch's center. Shapes: int64 (P,)."""
    cell = ((torch.arange(patches_per_side) + 0.5) * 3 / patches_per_side).long()
    return (3 * cell[:, None] + cell[None, :]).flatten()
