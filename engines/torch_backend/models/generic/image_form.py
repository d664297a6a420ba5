"""Flattens the output of an image encoder into one row per token, and rebuilds the output from such rows."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

_LEVELS = "deepstack_features"


@dataclass(frozen=True, slots=True)
class ImageForm:
    """The structure of an image encoder's output."""

    output_class: type[ModelOutput]
    field: str  #: the output's field with the features
    is_tensor: bool  #: else a list of tensors, one per image
    #: The same for each level of deepstack features, which are added to hidden states after later decoder layers.
    levels_are_tensors: tuple[bool, ...]

    @classmethod
    def of(cls, output: Any) -> Self:
        field = "last_hidden_state" if output.get("pooler_output") is None else "pooler_output"
        levels = tuple(isinstance(level, Tensor) for level in output.get(_LEVELS) or ())
        return cls(type(output), field, isinstance(output[field], Tensor), levels)

    def rows(self, output: Any) -> Tensor:
        """Shapes: returns (slots, levels * C)."""
        levels = [output[self.field], *(output.get(_LEVELS) or ())]
        return torch.cat([_flat(level) for level in levels], dim=1)

    def output(self, rows: Tensor) -> ModelOutput:
        """The encoder's output for these rows. Shapes: (slots, levels * C)."""
        features, *levels = rows.chunk(1 + len(self.levels_are_tensors), dim=1)
        made: dict[str, Any] = {
            "last_hidden_state": None,  # required by some classes
            self.field: _shaped(features, self.is_tensor),
        }
        if levels:
            pairs = zip(levels, self.levels_are_tensors, strict=True)
            made[_LEVELS] = [_shaped(level, is_tensor) for level, is_tensor in pairs]
        return self.output_class(**made)


def _flat(features: Any) -> Tensor:
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in features])


def _shaped(rows: Tensor, is_tensor: bool) -> Any:
    return rows[None] if is_tensor else [rows]
