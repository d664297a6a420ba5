"""The vectors in which the eye tells the decoder what it sees: one for each thing to say about a patch.

The eye learns to give every patch the sum of the vectors of what stands in its cell: "star", "red", "small",
"top", "left" and so on. All are at right angles, so that a decoder reads any of them by a dot product, and
the words of the language begin as the vectors of what they name (see `head_start`).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from training.shapes.scene_targets import SceneTargets
from training.shapes.world import BACKGROUNDS, COLORS, KINDS, PLACES, SIZES

ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "center", "right")
NOTHING = "nothing"  # the kind of an empty cell
COMPARED = (
    "kind",
    "color",
    "size",
    "background",
)  # of two images, to find out whether they are the same


@dataclass(frozen=True, slots=True)
class CodeBook:
    """Orthonormal vectors. Shapes: `vectors[property]` (classes, width); `spare` (24, width), others (width,).

    `patch` is in every patch and `word` in every word, to tell them apart. The rest is for the decoder's use:
    `second` marks the later images, `differs` what is not as in the image before.
    """

    CLASSES: ClassVar[dict[str, tuple[str, ...]]] = {
        "kind": (NOTHING, *KINDS),
        "color": COLORS,
        "size": SIZES,
        "row": ROWS,
        "column": COLUMNS,
        "place": PLACES,
        "background": BACKGROUNDS,
        "count": tuple(map(str, range(1 + len(PLACES)))),
    }
    GAIN: ClassVar[float] = 6.0  # makes logits of dot products, which are 1 for what is there
    EMPTY_CELL_WEIGHT: ClassVar[float] = 0.3  # most cells are empty; they must not drown the others

    vectors: dict[str, Tensor]
    patch: Tensor
    word: Tensor
    second: Tensor
    differs: Tensor
    spare: Tensor

    @classmethod
    def of_width(cls, width: int) -> "CodeBook":
        """The code book for features of a width; the same one every time."""
        generator = torch.Generator().manual_seed(0)
        square = torch.linalg.qr(torch.randn(width, width, generator=generator)).Q
        sizes = [len(classes) for classes in cls.CLASSES.values()]
        sizes += [4, sum(len(cls.CLASSES[name]) for name in COMPARED)]
        *vectors, marks, spare = square[: sum(sizes)].split(sizes)
        patch, word, second, differs = marks
        return cls(
            dict(zip(cls.CLASSES, vectors, strict=True)), patch, word, second, differs, spare
        )

    def write(self, targets: SceneTargets) -> Tensor:
        """What the eye should give. Shapes: (N, P, width)."""
        filled = (targets.kind > 0).unsqueeze(-1)
        total = self.patch.expand(*targets.kind.shape, -1)
        for name, vectors in self.vectors.items():
            code = vectors[class_of(targets, name)]
            total = total + (code * filled if name in ("color", "size") else code)
        return total

    def read(self, features: Tensor) -> dict[str, Tensor]:
        """Logits of each property. Shapes: (N, P, width) in, (N, P, classes) out."""
        return {name: self.GAIN * features @ vectors.T for name, vectors in self.vectors.items()}

    def loss(self, features: Tensor, targets: SceneTargets) -> Tensor:
        """Cross-entropy of what is read, summed over the properties, and the distance from what is written."""
        total = 0.3 * (features - self.write(targets)).square().sum(-1).mean()
        filled = (targets.kind > 0).float()
        weights = {
            "kind": filled + self.EMPTY_CELL_WEIGHT * (1 - filled),
            "color": filled,
            "size": filled,
        }
        for name, logits in self.read(features).items():
            weight = weights.get(name, 0.2 * torch.ones_like(filled))
            losses = F.cross_entropy(
                logits.flatten(0, 1), class_of(targets, name).flatten(), reduction="none"
            )
            normalizer = filled.sum() + 1 if name in weights else filled.numel()
            total = total + (losses * weight.flatten()).sum() / normalizer
        return total


def class_of(targets: SceneTargets, name: str) -> Tensor:
    """The class of each patch's cell in a property of `CodeBook.CLASSES`. Shapes: int64 (N, P)."""
    match name:
        case "row":
            return targets.place // len(COLUMNS)
        case "column":
            return targets.place % len(COLUMNS)
        case _:
            return getattr(targets, name)
