"""Finds out from a model's `create_masks_for_generate` which tokens attend to later ones, as those of an image may."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engines.base import UnsupportedCheckpoint

#: End of the error messages that refuse a model with images.
INSTEAD = "use a model that docs/models.md lists, such as Qwen2.5-VL, Idefics3 or Gemma 3"
#: A sample prompt: 0 is text, other numbers are runs of image slots.
_SAMPLE = (0, 0, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2, 0)
_SAMPLE_WINDOW = 3  #: shorter than the sample's images


def binds_prompts(model: PreTrainedModel) -> bool:
    """Whether all tokens of a prompt attend to each other in all layers, without windows."""
    masks = _masks(model, torch.zeros(1, len(_SAMPLE), dtype=torch.long)).values()
    return bool(masks) and all(mask is not None and bool(mask.bool().all()) for mask in masks)


def bidirectional_layers(model: PreTrainedModel) -> frozenset[str | None] | None:
    """The layer types in which an image's slots attend to each other; None: all layers.

    A layer's window hides earlier tokens of an image too. Raises: UnsupportedCheckpoint for other masks of the hook.
    """
    if binds_prompts(model):
        return None
    runs = torch.tensor(_SAMPLE)
    place = torch.arange(len(runs))
    causal = place <= place[:, None]
    whole = causal | ((runs > 0) & (runs == runs[:, None]))
    window = place > place[:, None] - _SAMPLE_WINDOW
    found: set[str | None] = set()
    for kind, mask in _masks(model, (runs > 0).long()[None]).items():
        seen = causal if mask is None else mask[0, 0].bool()
        if any(torch.equal(seen, whole & within) for within in (causal | True, window)):
            found.add(kind)
        elif not any(torch.equal(seen, causal & within) for within in (causal | True, window)):
            raise UnsupportedCheckpoint(
                f"{type(model).__name__} lets tokens attend to later tokens outside their image, which is not "
                f"supported; {INSTEAD}"
            )
    return None if found == {None} else frozenset(found)


def _masks(model: PreTrainedModel, types: Tensor) -> dict[str | None, Any]:
    """Masks of a prompt by layer type, as transformers creates them for SDPA; empty without the hook."""
    hook: Any = getattr(model, "create_masks_for_generate", None)
    if hook is None:
        return {}
    text: Any = model.config.get_text_config(decoder=True)
    length = types.shape[1]
    parameters = inspect.signature(hook).parameters
    named = {name: types for name in parameters if name.endswith("token_type_ids")}
    before, window = text._attn_implementation_internal, getattr(text, "sliding_window", None)
    text._attn_implementation_internal = "sdpa"
    if window:
        text.sliding_window = _SAMPLE_WINDOW
    try:
        masks = hook(
            model.config, torch.zeros(1, length, 1), None, None, torch.arange(length)[None],
            is_first_iteration=True, **(named or {"mm_token_type_ids": types}),
        )  # fmt: skip
    finally:
        text._attn_implementation_internal = before
        if window:
            text.sliding_window = window
    return masks if isinstance(masks, dict) else {None: masks}
