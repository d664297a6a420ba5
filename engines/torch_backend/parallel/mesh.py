"""The devices that share a model: each holds a part of every large weight, and they add up what they computed."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn


class Mesh(Protocol):
    """One member's view. Rank 0 schedules, the others compute the same batches."""

    @property
    def rank(self) -> int:
        """Of this member, from 0."""
        ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all members' tensors. Shapes: any, kept."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All members' tensors side by side in the last dimension, by rank. Shapes: (..., n); returns (..., size * n)."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's tensor, in memory of the others' that has its shape. Shapes: any, kept."""
        ...


@dataclass(frozen=True, slots=True)
class SingleMesh:
    """One device that has all of the model."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x


SINGLE = SingleMesh()

#: Dimensions of outputs and of inputs in what linears keep.
DIMS: dict[str, tuple[int, int | None]] = {
    "weight": (0, 1),
    "bias": (0, None),
    "integers": (0, 1),
    "scale": (0, None),
    "pairs": (0, 1),
    "scale_zero": (1, 0),
}


@dataclass(frozen=True, slots=True)
class Share:
    """What a member has of a layer: some of its outputs, or what some of its inputs add to the sums of all."""

    mesh: Mesh = SINGLE
    of: Literal["outputs", "inputs"] | None = None  #: None: all of it
    num_parts: int = 0  #: where they are fewer than members, who then share them; 0: one a member

    @property
    def count(self) -> int:
        """Parts of what is shared."""
        return self.num_parts or self.mesh.size

    @property
    def place(self) -> int:
        """Which of them is this member's."""
        return self.mesh.rank * self.count // self.mesh.size

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """The member's part of a tensor of the whole layer, by its name there."""
        if self.of is None or self.mesh.size == 1:
            return tensor
        dim = DIMS[name][self.of == "inputs"]
        if dim is not None:
            return tensor.tensor_split(self.count, dim)[self.place].contiguous()
        if name == "bias" and self.mesh.rank:
            return torch.zeros_like(tensor)  # it is added once
        return tensor


WHOLE = Share()


def share_of(linear: nn.Module) -> Share:
    """What this member has of a linear map, whoever joins what members compute."""
    return vars(linear).get("share_of_whole") or getattr(linear, "share", WHOLE)


def share_heads(num_heads: int, mesh: Mesh) -> Share:
    """Outputs of whole heads: as many a member, or one that several have where there are fewer heads than members.

    Raises: ValueError where neither comes out even.
    """
    if num_heads % mesh.size == 0:
        return Share(mesh, "outputs")
    if mesh.size % num_heads == 0:
        return Share(mesh, "outputs", num_heads)
    raise ValueError(f"{mesh.size} devices cannot share {num_heads} heads of keys and values")


def advise_size(num_heads: int, num_kv_heads: int, num_channels: int) -> str:
    """What to set instead: the numbers of members that can share such layers, as words."""
    fitting = [
        str(size)
        for size in range(2, num_heads + 1)
        if num_heads % size == num_channels % size == 0
        and (num_kv_heads % size == 0 or size % num_kv_heads == 0)
    ]
    return f"set --tensor-parallel to {', '.join(fitting) or '1'}"


def least(number: int, mesh: Mesh) -> int:
    """The smallest of all members' numbers."""
    return int(mesh.all_gather(torch.tensor([number])).min())
