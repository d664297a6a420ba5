"""Whether a model's masks say more than its layers told when they were probed."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.generic.attention import NAME, LayerSpec

_SIZES = ("sliding_window", "attention_chunk_size")


def check_masks(model: PreTrainedModel, layers: list[LayerSpec]) -> None:
    """Compare what transformers would mask with what the layers asked for, behind every window and chunk.

    Raises: UnsupportedCheckpoint for a mask that no layer told of: the engine would leave it out.
    """
    text: Any = model.config.get_text_config(decoder=True)
    sizes = {getattr(text, name, None) for name in _SIZES} - {None}
    for size in sorted(size for size in sizes if type(size) is int and size <= 2**13):
        masks = _their_masks(text, size + 3)
        for number, spec in enumerate(layers):
            theirs = masks.get(spec.kind) if isinstance(masks, dict) else masks
            if theirs is not None and not torch.equal(theirs[0, 0].bool(), _ours(spec, size + 3)):
                raise UnsupportedCheckpoint(
                    f"{type(model).__name__} cannot be run over pages: attention layer {number} has a "
                    "mask that it does not tell of"
                )


def _their_masks(text: Any, length: int) -> Any:
    """Of one sequence of that length, with transformers' plain attention."""
    text._attn_implementation_internal = "sdpa"
    try:
        embeddings, positions = torch.zeros(1, length, 1), torch.arange(length)[None]
        return create_masks_for_generate(text, embeddings, None, None, positions)
    finally:
        text._attn_implementation_internal = NAME


def _ours(spec: LayerSpec, length: int) -> Tensor:
    key = torch.arange(length)
    query = key[:, None]
    seen = key <= query
    if spec.window is not None:
        seen = seen & (key > query - spec.window)
    if spec.chunk is not None:
        seen = seen & (key // spec.chunk == query // spec.chunk)
    return seen
