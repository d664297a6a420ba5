"""Linear read-outs that tell from a picture's features which scene it shows; used in training only.

A vision transformer learns slowly from the answers of a language model alone. Asking every patch what
stands in its own cell of the three by three places, and what the whole scene is like, teaches it directly.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.shapes.world import BACKGROUNDS, COLORS, KINDS, PLACES, SIZES

SILHOUETTE_SIZE = 4  # parts of a patch along each side
FOREGROUND_LEVELS = 45  # of 255 in some channel, by which a shape differs from the background


@dataclass(frozen=True, slots=True)
class SceneTargets:
    """What the heads should say for N pictures of P patches.

    Shapes: class indices, int64 (N, P): `kind` (0 is none), `color`, `size` and `place` of each patch's own
    cell; `background` and `count`, the same for every patch of a picture. `silhouette`, float
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
    def of(cls, pictures: Tensor, codes: Tensor, patches_per_side: int) -> "SceneTargets":
        """Targets of pictures whose scenes are encoded as in `gallery.encode`.

        Shapes: uint8 (N, size, size, 3) and uint8 (N, CODE_LENGTH).
        """
        codes = codes.long()
        place = place_of_patches(patches_per_side).expand(len(codes), -1)
        kind, color, size = codes[:, 1:].view(-1, len(PLACES), 3).unbind(-1)
        background = codes[:, :1].expand_as(place)
        count = (kind > 0).sum(1, keepdim=True).expand_as(place)
        kind, color, size = (cells.gather(1, place) for cells in (kind, color, size))
        silhouette = silhouettes(pictures, patches_per_side)
        return cls(
            kind,
            (color - 1).clamp_min(0),
            (size - 1).clamp_min(0),
            place,
            background,
            count,
            silhouette,
        )


def silhouettes(pictures: Tensor, patches_per_side: int) -> Tensor:
    """Where a picture differs from its background, which is its median color.

    Shapes: uint8 (N, size, size, 3) in, float (N, P, SILHOUETTE_SIZE ** 2) out.
    """
    levels = pictures.float()
    median = levels.flatten(1, 2).median(1).values[:, None, None]
    differs = ((levels - median).abs().amax(-1) > FOREGROUND_LEVELS).float()
    parts = F.adaptive_avg_pool2d(differs[:, None], patches_per_side * SILHOUETTE_SIZE)
    parts = parts.unflatten(2, (patches_per_side, -1)).unflatten(4, (patches_per_side, -1))
    return parts.transpose(3, 4).reshape(len(pictures), patches_per_side**2, SILHOUETTE_SIZE**2)


def place_of_patches(patches_per_side: int) -> Tensor:
    """The index in PLACES of the cell that holds each patch's center. Shapes: int64 (P,)."""
    cell = ((torch.arange(patches_per_side) + 0.5) * 3 / patches_per_side).long()
    return (3 * cell[:, None] + cell[None, :]).flatten()


class SceneHeads(nn.Module):
    """One linear layer per property, on each patch's feature of width `width`."""

    NUM_CLASSES: ClassVar[dict[str, int]] = {
        "kind": 1 + len(KINDS),
        "color": len(COLORS),
        "size": len(SIZES),
        "place": len(PLACES),
        "background": len(BACKGROUNDS),
        "count": 1 + len(PLACES),
    }
    EMPTY_CELL_WEIGHT = 0.3  # most cells are empty; this keeps them from drowning the others

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, sum(self.NUM_CLASSES.values()))
        self.silhouette = nn.Linear(width, SILHOUETTE_SIZE**2)

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        """Logits of each property. Shapes: (N, P, width) in, (N, P, classes) out."""
        logits = self.linear(features).split(list(self.NUM_CLASSES.values()), dim=-1)
        return dict(zip(self.NUM_CLASSES, logits, strict=True))

    def loss(self, features: Tensor, targets: SceneTargets) -> Tensor:
        """Mean cross-entropy, summed over the properties; color and size count only where a shape is."""
        total = 3 * F.binary_cross_entropy_with_logits(
            self.silhouette(features), targets.silhouette
        )
        filled = (targets.kind > 0).float()
        everywhere = torch.ones_like(filled)
        weights = {
            "kind": filled + self.EMPTY_CELL_WEIGHT * (1 - filled),
            "color": filled,
            "size": 0.5 * filled,
        }
        for name, logits in self(features).items():
            weight = weights.get(name, 0.2 * everywhere)
            losses = F.cross_entropy(
                logits.flatten(0, 1), getattr(targets, name).flatten(), reduction="none"
            )
            normalizer = filled.sum() + 1 if name in weights else everywhere.sum()
            total = total + (losses * weight.flatten()).sum() / normalizer
        return total

    @torch.no_grad()
    def accuracy(self, features: Tensor, targets: SceneTargets) -> dict[str, float]:
        """Share of right read-outs, each cell's logits averaged over its patches; "scene" is all cells right."""
        patches_per_side = round(features.shape[1] ** 0.5)
        member = F.one_hot(place_of_patches(patches_per_side), len(PLACES)).float()
        first_patch = member.argmax(0)
        result, right = {}, torch.ones(len(features), len(PLACES), dtype=torch.bool)
        filled = targets.kind[:, first_patch] > 0
        for name, logits in self(features).items():
            guess = torch.einsum("npc,pk->nkc", logits.log_softmax(-1), member).argmax(-1)
            hit = guess == getattr(targets, name)[:, first_patch]
            if name in ("kind", "color", "size"):
                right &= hit | ~(filled | torch.tensor(name == "kind"))
                hit = hit[filled]
            result[name] = hit.float().mean().item()
        return result | {"scene": right.all(1).float().mean().item()}
