"""Flattens the output of an image encoder into one row per token, and rebuilds the output from these rows."""

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
    #: For the features, then for each level of DeepStack features: whether they are one tensor or a list of one tensor
    #: per image. DeepStack features are added to the hidden states after decoder layers.
    are_tensors: tuple[bool, ...]

    @classmethod
    def of(cls, output: Any) -> Self:
        field = "last_hidden_state" if output.get("pooler_output") is None else "pooler_output"
        parts = (output[field], *(output.get(_LEVELS) or ()))
        return cls(type(output), field, tuple(isinstance(part, Tensor) for part in parts))

    def rows(self, output: Any) -> Tensor:
        """Shapes: returns (slots, levels * C)."""
        levels = [output[self.field], *(output.get(_LEVELS) or ())]
        flat = [torch.cat([x.reshape(-1, x.shape[-1]) for x in level]) for level in levels]
        return torch.cat(flat, dim=1)

    def output(self, rows: Tensor) -> ModelOutput:
        """The encoder's output for these rows. Shapes: (slots, levels * C)."""
        parts = zip(rows.chunk(len(self.are_tensors), dim=1), self.are_tensors, strict=True)
        features, *levels = (part[None] if is_tensor else [part] for part, is_tensor in parts)
        # some classes require their first field
        made: dict[str, Any] = {"last_hidden_state": None, self.field: features}
        return self.output_class(**made | ({_LEVELS: levels} if levels else {}))
