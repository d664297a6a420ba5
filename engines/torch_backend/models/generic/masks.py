"""What a model's masks say beyond what its layers told when they were probed."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.generic.attention import NAME, LayerSpec

#: Of every refusal of a model of images.
INSTEAD = "use a model of images that docs/models.md lists, such as Qwen2.5-VL, Idefics3 or Gemma 3"
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


#: A made-up prompt: what its tokens are, by the number of an image's run of slots; 0 is text.
_SAMPLE = (0, 0, 1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2, 0)
_SAMPLE_WINDOW = 3  #: shorter than an image


def binds_prompts(model: PreTrainedModel) -> bool:
    """Whether the tokens of a prompt see all of it, beyond windows too."""
    hook: Any = getattr(model, "create_masks_for_generate", None)
    if hook is None:
        return False
    types = torch.zeros(1, len(_SAMPLE), dtype=torch.long)
    masks = _masks_by(hook, model, types).values()
    return all(mask is not None and bool(mask.bool().all()) for mask in masks)


def find_sight(model: PreTrainedModel) -> frozenset[str | None] | None:
    """The types of layers in which the slots of an image see each other; None: there are no types, all layers do.

    A window holds within an image, too, for what lies before. Raises: UnsupportedCheckpoint where a model's hook
    lets tokens see otherwise.
    """
    hook: Any = getattr(model, "create_masks_for_generate", None)
    if hook is None:
        return frozenset()
    if binds_prompts(model):
        return None
    runs = torch.tensor(_SAMPLE)
    place = torch.arange(len(runs))
    causal = place <= place[:, None]
    whole = causal | ((runs > 0) & (runs == runs[:, None]))
    window = place > place[:, None] - _SAMPLE_WINDOW
    found: set[str | None] = set()
    for kind, mask in _masks_by(hook, model, (runs > 0).long()[None]).items():
        seen = causal if mask is None else mask[0, 0].bool()
        if any(torch.equal(seen, whole & within) for within in (causal | True, window)):
            found.add(kind)
        elif not any(torch.equal(seen, causal & within) for within in (causal | True, window)):
            raise UnsupportedCheckpoint(
                f"{type(model).__name__} lets tokens see others than those before them and those of their image, "
                f"as between images, which is not supported; {INSTEAD}"
            )
    return None if found == {None} else frozenset(found)


def _masks_by(hook: Any, model: PreTrainedModel, types: Tensor) -> dict[str | None, Any]:
    """Masks of a prompt by type of layer, with transformers' plain attention."""
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


def _ours(spec: LayerSpec, length: int) -> Tensor:
    key = torch.arange(length)
    query = key[:, None]
    seen = key <= query
    if spec.window is not None:
        seen = seen & (key > query - spec.window)
    if spec.chunk is not None:
        seen = seen & (key // spec.chunk == query // spec.chunk)
    return seen
