"""The devices that share a model: each holds a part of every large weight, and they add up what they computed."""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor


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
class Shard:
    """A rank's part of a layer: some of its outputs, or of its inputs, whose partial sums are added up."""

    mesh: Mesh = SINGLE
    of: Literal["outputs", "inputs"] | None = None  #: None: all of it
    num_parts: int = (
        0  #: if fewer than ranks, several ranks hold the same part; 0: one part per rank
    )
    gathers: bool = False  #: whether every rank is given the outputs of all
    splits: bool = False  #: whether every rank is given all inputs, and uses its own

    @property
    def count(self) -> int:
        return self.num_parts or self.mesh.size

    @property
    def index(self) -> int:
        """Of this rank's part."""
        return self.mesh.rank * self.count // self.mesh.size

    @property
    def joins(self) -> bool:
        """Whether ranks exchange what they computed."""
        return self.mesh.size > 1 and (
            self.of == "inputs" or (self.gathers and self.of is not None)
        )

    def whole_shape(self, num_outputs: int, num_inputs: int) -> tuple[int, int]:
        """Outputs and inputs of all ranks, from those of one."""
        return (
            num_outputs * (self.count if self.of == "outputs" else 1),
            num_inputs * (self.count if self.of == "inputs" else 1),
        )

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """The part of this rank of a tensor of the whole layer, by its name there."""
        if self.of is None or self.mesh.size == 1:
            return tensor
        dim = DIMS[name][self.of == "inputs"]
        if dim is not None:
            return tensor.tensor_split(self.count, dim)[self.index].contiguous()
        if name == "bias" and self.mesh.rank:
            return torch.zeros_like(tensor)  # it is added once
        return tensor

    def join(self, y: Tensor) -> Tensor:
        """The layer's outputs of what this rank computed. Shapes: (M, N); returns (M, N of all ranks) if it gathers."""
        if not self.joins:
            return y
        return self.mesh.all_reduce(y) if self.of == "inputs" else self.mesh.all_gather(y)


WHOLE = Shard()


def share_heads(num_heads: int, mesh: Mesh) -> Shard:
    """Outputs of whole heads: as many a member, or one that several have where there are fewer heads than members.

    Raises: ValueError where neither comes out even.
    """
    if num_heads % mesh.size == 0:
        return Shard(mesh, "outputs")
    if mesh.size % num_heads == 0:
        return Shard(mesh, "outputs", num_heads)
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
