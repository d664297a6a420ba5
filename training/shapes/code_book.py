"""Target vectors of the vision tower: one for each property of a patch.

The tower learns to output, for every patch, the sum of the vectors of its cell's properties: "star", "red", "small",
"top", "left" and so on. The vectors are orthogonal, so the decoder can read each property by a dot product. The targets
are used only in training: without them, from the decoder's answers alone, a vision tower learns slowly.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from training.shapes.world import BACKGROUNDS, COLORS, KINDS, PLACES, SIZES

CLASSES: dict[str, tuple[str, ...]] = {
    "kind": ("nothing", *KINDS),
    "color": COLORS,
    "size": SIZES,
    "row": ("top", "middle", "bottom"),
    "column": ("left", "center", "right"),
    "place": PLACES,
    "background": BACKGROUNDS,
    "count": tuple(map(str, range(1 + len(PLACES)))),
}
GAIN = 6.0  # scales dot products, which are 1 for properties that are present, to logits
EMPTY_CELL_WEIGHT = 0.3  # most cells are empty; they must not dominate the loss


class CodeBook:
    """Orthonormal vectors. Shapes: `vectors[property]` (classes, width); `patch` (1, width), added to every patch."""

    def __init__(self, width: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        square = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q.to(device)
        sizes = [len(classes) for classes in CLASSES.values()]
        *vectors, self.patch = square[: sum(sizes) + 1].split([*sizes, 1])
        self.vectors = dict(zip(CLASSES, vectors, strict=True))

    def loss(self, features: Tensor, codes: Tensor) -> Tensor:
        """The cross-entropy of the decoded properties, and the distance of the features from their targets.

        Shapes: (N, P, width), uint8 (N, CODE_LENGTH).
        """
        targets = scene_targets(codes, round(features.shape[1] ** 0.5))
        filled = (targets["kind"] > 0).float()
        wanted = self.patch.expand_as(features)
        for name, vectors in self.vectors.items():
            code = vectors[targets[name]]
            wanted = wanted + (code * filled[..., None] if name in ("color", "size") else code)
        total = 0.3 * (features - wanted).square().sum(-1).mean()
        weights = {
            "kind": filled + EMPTY_CELL_WEIGHT * (1 - filled),
            "color": filled,
            "size": filled,
        }
        for name, vectors in self.vectors.items():
            logits = GAIN * features @ vectors.T
            weight = weights.get(name, 0.2 * torch.ones_like(filled))
            losses = F.cross_entropy(
                logits.flatten(0, 1), targets[name].flatten(), reduction="none"
            )
            normalizer = filled.sum() + 1 if name in weights else filled.numel()
            total = total + (losses * weight.flatten()).sum() / normalizer
        return total


def scene_targets(codes: Tensor, patches_per_side: int) -> dict[str, Tensor]:
    """The class of each patch in every property of CLASSES, from its cell or from the whole image.

    Shapes: uint8 (N, CODE_LENGTH) from `gallery.encode` in, int64 (N, P) each out.
    """
    codes = codes.long()
    third = torch.arange(patches_per_side, device=codes.device) * 3 // patches_per_side
    place = (3 * third[:, None] + third).flatten().expand(len(codes), -1)
    cells = codes[:, 1:].view(-1, len(PLACES), 3).unbind(-1)
    kind, color, size = (each.gather(1, place) for each in cells)
    return {
        "kind": kind,
        "color": (color - 1).clamp_min(0),
        "size": (size - 1).clamp_min(0),
        "row": place // 3,
        "column": place % 3,
        "place": place,
        "background": codes[:, :1].expand_as(place),
        "count": (cells[0] > 0).sum(1, keepdim=True).expand_as(place),
    }
