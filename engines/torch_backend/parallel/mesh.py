"""The devices that share a model: each holds a part of every large weight, and they add up what they computed."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Mesh(Protocol):
    """One member's view. Rank 0 schedules, the others compute the same batches."""

    @property
    def rank(self) -> int:
        """Of this member, from 0."""
        ...

    @property
    def size(self) -> int:
        """Members."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all members' tensors. Shapes: any, kept."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All members' tensors side by side in the last dimension, by rank. Shapes: (..., n); returns (..., size * n)."""
        ...


@dataclass(frozen=True, slots=True)
class SingleMesh:
    """One device that has all of the model."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Itself."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Itself."""
        return x


SINGLE = SingleMesh()
