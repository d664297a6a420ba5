"""The interface of readers of published quantization formats, and the int4 and int8 tensors of our kernels.

Shape letters: K inputs, N outputs, G groups of inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engines.packages.checkpoint_json import Fields
from engines.torch_backend.layers.linear import METHODS, choose_group_size, pack_pairs
from engines.torch_backend.loading.stored_tensors import StoredTensor
from engines.torch_backend.models.config import UnsupportedCheckpoint

#: The form of a linear layer's loaded weights: integers for our kernels, or floats.
Form = Literal["int4", "int8", "float"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and quantization of a linear layer, read from tensor headers."""

    shape: tuple[int, int]  #: (N, K)
    bits: int = 0  #: bits per integer; 0: the weights are floats
    group_size: int = 0  #: inputs that share a scale
    is_symmetric: bool = False  #: whether the middle integer represents 0

    @property
    def form(self) -> Form:
        """The integer form if our kernels compute it exactly, else float."""
        num_inputs = self.shape[1]
        if self.bits == 4 and num_inputs % self.group_size == 0:
            return "int4" if choose_group_size(self.group_size) else "float"
        is_int8 = self.bits == 8 and self.is_symmetric and self.group_size == num_inputs
        return "int8" if is_int8 else "float"

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes in memory, with scales or floats of this type."""
        num_outputs, num_inputs = self.shape
        if self.form == "float":
            return num_outputs * num_inputs * dtype.itemsize
        return METHODS[self.form].num_bytes(self.shape, dtype, choose_group_size(self.group_size))


@dataclass(frozen=True, slots=True)
class Integers:
    """Weights as unsigned integers: scale * (value - zero), with a scale and a zero per output and group of inputs."""

    values: Tensor  #: uint8 (N, K)
    bits: int
    group_size: int
    scale: Tensor  #: float32 (G, N)
    zero: Tensor | None  #: float32 (G, N); None: the middle integer
    order: Tensor | None = None  #: int64 (K,): the input of each column; None: column i is input i
    #: float32 (G, N), the value of the integer 0, in formats without an integer zero point
    base: Tensor | None = None

    def int4(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of an int4 `Linear` in groups of 64 or 32. Its zero is the value of the integer 8."""
        size = choose_group_size(self.group_size)
        assert size is not None
        if self.base is not None:
            offset = self.base + 8 * self.scale
        elif self.zero is None:
            offset = torch.zeros_like(self.scale)
        else:
            offset = (8 - self.zero) * self.scale
        pair = torch.stack([self.scale, offset], -1).to(dtype)
        groups = self.values.view(self.values.shape[0], -1, size)
        return {
            "pairs": pack_pairs(groups),
            "scale_zero": pair.repeat_interleave(self.group_size // size, 0),
        }

    def int8(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of an int8 `Linear`."""
        integers = (self.values ^ 128).view(torch.int8)
        return {"integers": integers, "scale": self.scale[0].to(dtype)}

    def numbers(self) -> Tensor:
        """Dequantize the integers. Shapes: returns float32 (N, K)."""
        num_inputs = self.values.shape[1]
        group = torch.arange(num_inputs, device=self.values.device) // self.group_size
        zero = 2 ** (self.bits - 1) if self.zero is None else self.zero.t()[:, group]
        if self.base is not None:
            numbers = self.values * self.scale.t()[:, group] + self.base.t()[:, group]
        else:
            numbers = (self.values.float() - zero) * self.scale.t()[:, group]
        if self.order is None:
            return numbers
        return torch.empty_like(numbers).index_copy_(1, self.order, numbers)


class StoredLinear:
    """The stored tensors of one quantized linear layer, before they are read."""

    def __init__(self, name: str, parts: Mapping[str, StoredTensor], device: torch.device) -> None:
        self.name = name
        self.parts = parts
        self._device = device

    @property
    def num_values(self) -> int:
        return sum(part.num_values for part in self.parts.values())

    def expect(self, part: str, shape: tuple[int, ...] | None, *kinds: str) -> StoredTensor:
        """The layer's tensor of this name; checks shape and type. Raises: UnsupportedCheckpoint."""
        stored = self.parts.get(part)
        if stored is None:
            raise self.refuse(part, "is missing")
        if stored.kind not in kinds:
            raise self.refuse(part, f"has type {stored.kind}, not {' or '.join(kinds)}")
        if shape is not None and stored.shape != shape:
            raise self.refuse(part, f"has shape {stored.shape}; other tensors require {shape}")
        return stored

    def expect_matrix(self, part: str, *kinds: str) -> tuple[int, int]:
        """The shape of a tensor with two dimensions. Raises: UnsupportedCheckpoint."""
        shape = self.expect(part, None, *kinds).shape
        if len(shape) != 2 or 0 in shape:
            raise self.refuse(part, f"has shape {shape}, which is not a matrix")
        return shape[0], shape[1]

    def read(self, part: str) -> Tensor:
        return self.parts[part].map().to(self._device)

    def refuse(self, part: str, why: str) -> UnsupportedCheckpoint:
        return UnsupportedCheckpoint(f"the weight {self.name}.{part} {why}")


class Reader(ABC):
    """Reader of one published format, with the settings of one checkpoint."""

    name: str  #: name of the format in messages
    marker: tuple[str, ...]  #: a layer with a tensor of one of these names is quantized
    part_names: frozenset[str]  #: names of all tensors of a quantized layer
    ignored: frozenset[str] = frozenset()  #: tensors whose names end with these are skipped

    def split(
        self, stored: Iterable[StoredTensor], device: torch.device
    ) -> tuple[list[StoredLinear], list[StoredTensor]]:
        """The quantized linear layers of a checkpoint, and its other tensors."""
        candidates: dict[str, dict[str, StoredTensor]] = {}
        others: list[StoredTensor] = []
        for tensor in stored:
            name, _, part = tensor.name.rpartition(".")
            if part in self.part_names:
                candidates.setdefault(name, {})[part] = tensor
            elif part not in self.ignored:
                others.append(tensor)
        linears = []
        for name, parts in candidates.items():
            if any(marker in parts for marker in self.marker):
                linears.append(StoredLinear(name, parts, device))
            else:
                others += parts.values()
        return linears, others

    @abstractmethod
    def layout(self, linear: StoredLinear) -> Layout:
        """The layout of a layer, from its headers. Raises: UnsupportedCheckpoint, which names the invalid tensor."""

    @abstractmethod
    def read(self, linear: StoredLinear) -> Integers | Tensor:
        """The weights of a layer: integers, or float32 (N, K). Raises: UnsupportedCheckpoint."""


def read_group_size(config: Fields) -> int:
    """Inputs per group; -1: one group of all inputs. Raises: UnsupportedCheckpoint."""
    size = config.whole("group_size", 128, at_least=-1, at_most=2**20)
    if size == 0:
        raise config.refuse("group_size", "is 0; set -1 for one group of all inputs")
    return size


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpack integers of 4 or 8 bits, lowest bits first. Shapes: int32 (N, n); returns uint8 (N, n * 32 / bits)."""
    octets = words.flatten().view(torch.uint8).view(len(words), -1)
    if bits == 8:
        return octets
    return torch.stack([octets & 15, octets >> 4], -1).flatten(-2)


def input_order(linear: StoredLinear, part: str, layout: Layout) -> Tensor | None:
    """The order of the inputs in which groups are contiguous; None if they already are.

    Shapes: returns (K,). Raises: UnsupportedCheckpoint if a group does not have the layout's number of inputs.
    """
    if part not in linear.parts:
        return None
    groups = linear.read(part).long()
    usual = torch.arange(layout.shape[1], device=groups.device) // layout.group_size
    if torch.equal(groups, usual):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], usual):
        raise linear.refuse(part, f"does not assign {layout.group_size} inputs to each group")
    return order
