"""Converts transformers' rotary module to a table of angles.

Shape letters: N tokens, R rows of positions, P positions, D head width.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.models.config import BeyondOurProgram
from engines.torch_backend.models.generic.rope import batched

_TABLE_ROWS = 1 << 13  # positions per call


class Rotary:
    """Angles of a rotary module that rotates pairs from both halves of a head. Other channels have the angle 0."""

    def __init__(self, module: nn.Module, num_rows: int, head_dim: int) -> None:
        """Raises: BeyondOurProgram."""
        self.module = module
        self._num_rows = num_rows
        takes_types = "layer_type" in inspect.signature(module.forward).parameters
        types: Any = getattr(module, "layer_types", None) if takes_types else None
        self._types: Sequence[str | None] = types or (None,)  #: layer types, one table each
        self.num_tables = len(self._types)
        found = {self._check(layer_type, head_dim) for layer_type in self._types}
        if len(found) > 1:
            raise BeyondOurProgram("its layers rotate different channels")
        [(self.num_rotated, self._num_unrotated, channel_rows)] = found  #: channels of a head
        self._channel_rows = torch.tensor(channel_rows)  # (D,)

    def _check(self, layer_type: str | None, head_dim: int) -> tuple[int, int, tuple[int, ...]]:
        """Numbers of rotated and other channels, and the row of positions of each channel."""
        # each token has position 1 in one row and 0 in the other rows
        probes = torch.eye(self._num_rows, dtype=torch.long).T
        cos, sin = self._angles(probes, layer_type)
        width = cos.shape[-1]
        num_unrotated = head_dim - width
        if num_unrotated < 0 or num_unrotated % 2:
            raise BeyondOurProgram(f"rotary angles cover {width} of {head_dim} channels of a head")
        if not all(torch.equal(x[:, : width // 2], x[:, width // 2 :]) for x in (cos, sin)):
            raise BeyondOurProgram("rotated pairs of channels are not the halves of a head")
        is_rotated = sin != 0
        if not bool((is_rotated.sum(0) == 1).all()):
            raise BeyondOurProgram("several rows of positions, or none, rotate a channel")
        rows = _with_unrotated(is_rotated.int().argmax(0)[None], num_unrotated, 0)[0]
        return width, num_unrotated, tuple(rows.tolist())

    def table(self, max_positions: int, dtype: torch.dtype, device: torch.device) -> RotaryTable:
        """Tables from position 0 for each type of layer."""
        first, *others = (self._of(each, max_positions, dtype, device) for each in self._types)
        first.others = tuple(others)
        return first

    def _of(
        self, layer_type: str | None, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> RotaryTable:
        chunks = [
            self._angles(positions.expand(self._num_rows, -1), layer_type)
            for positions in torch.arange(max_positions).split(_TABLE_ROWS)
        ]
        cos, sin = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        cos, sin = (
            _with_unrotated(cos, self._num_unrotated, 1),
            _with_unrotated(sin, self._num_unrotated, 0),
        )
        half = sin.shape[1] // 2
        return RotaryTable(
            cos.to(device, dtype),
            torch.cat([-sin[:, :half], sin[:, half:]], dim=1).to(device, dtype),
            self._channel_rows.to(device) if self._num_rows > 1 else None,
            self._num_rows,
        )

    def _angles(self, positions: Tensor, layer_type: str | None) -> tuple[Tensor, Tensor]:
        """Shapes: (R, N); returns two float32 (N, D)."""
        device = next((b.device for b in self.module.buffers()), positions.device)
        more = () if layer_type is None else (layer_type,)
        given = batched(positions.to(device))
        cos, sin = self.module(torch.zeros(1, 1, 1, device=device), given, *more)
        if cos.dim() != 3:
            raise BeyondOurProgram("its rotary module returns another shape than (1, N, D)")
        return _in_halves(cos[0]), _in_halves(sin[0])


def _in_halves(x: Tensor) -> Tensor:
    """Reorder channels to the halves of a head if neighbours have equal angles. Shapes: (N, D); returns (N, D)."""
    left, right = x[:, ::2], x[:, 1::2]
    return torch.cat([left, right], dim=1) if torch.equal(left, right) else x


def _with_unrotated(x: Tensor, num_unrotated: int, value: int) -> Tensor:
    """Add the channels that are not rotated at the end of each half. Shapes: (P, rotated); returns (P, D)."""
    rest = x.new_full((len(x), num_unrotated // 2), value)
    left, right = x.chunk(2, dim=1)
    return torch.cat([left, rest, right, rest], dim=1)
