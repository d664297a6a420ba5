"""Compares a loaded model's logits in engine steps with those of transformers' forward pass.

It runs two prompts of different lengths, in chunks that share steps with decodes, and one prompt with an image. Short
prompts are enough: errors in windows, scales, positions, states or features already change their logits.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engines.core.sequence import Prompt, ScheduledSequence, Sequence
from engines.torch_backend.models.generic.token_types import token_types, type_names
from engines.torch_backend.multimodal.processed import ProcessedImage
from shared.protocol import SamplingParams

LENGTHS = (40, 13)
CHUNK = 9
NUM_SAMPLED = 3


def largest_difference(runner: Any, model: Any, token_ids: list[int]) -> float:
    """Largest difference of logits relative to their standard deviation, for prompts of these tokens."""
    sequences = _make_sequences(runner, token_ids)
    found = _sample(runner, sequences)
    worst = 0.0
    with model.as_transformers_does() as plain:
        for sequence in sequences:
            ids = torch.tensor([sequence.token_ids[:-1]], device=runner.device)
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            scores = plain(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
            worst = max(worst, _worst(sequence, found, scores))
    return worst


def difference_with_image(runner: Any, model: Any, prompt: Prompt) -> float | None:
    """`largest_difference` with an image, which transformers encodes itself. None if the prompt does not fit."""
    length = len(prompt.token_ids)
    num_blocks = -(-(length + NUM_SAMPLED) // runner.block_size)
    if num_blocks > runner.num_blocks or length + NUM_SAMPLED > runner.max_model_len:
        return None
    sequence = Sequence(
        "self-check-image", list(prompt.token_ids), length, SamplingParams(temperature=0), prompt.images,
        prompt_positions=prompt.positions,
    )  # fmt: skip
    sequence.block_ids = list(range(num_blocks))
    chunk = length if model.binds_prompts else max(CHUNK, -(-length // 3))
    found = _sample(runner, [sequence], chunk)
    ids = torch.tensor([sequence.token_ids[:-1]], device=runner.device)
    with model.as_transformers_does() as plain:
        slot_id: Any = getattr(plain.config, "image_token_id", None)
        inputs = whole_inputs(plain, ids, slot_id, prompt.images[0].pixels)
        if model.binds_prompts:  # types distinguish prompts from sampled tokens
            inputs["token_type_ids"] = (torch.arange(ids.shape[1])[None] >= length).long()
        scores = plain(input_ids=ids, use_cache=False, **inputs).logits[0]
    return _worst(sequence, found, scores)


def whole_inputs(
    model: PreTrainedModel, token_ids: Tensor, slot_id: int | None, image: ProcessedImage
) -> dict[str, Any]:
    """Arguments of transformers' forward pass for a complete prompt with an image. Shapes: token_ids (1, N)."""
    arguments = {*inspect.signature(model.forward).parameters}
    names = {*type_names(arguments)}
    if any("grid" in name for name in arguments):
        names.add("mm_token_type_ids")
    is_slot = (token_ids == slot_id).long()
    types: dict[str, Any] = token_types(
        names, model.config, token_ids, is_slot, torch.ones_like(is_slot, dtype=torch.bool)
    )
    given = encoder_inputs(model, image)
    return types | {name: x for name, x in given.items() if name in arguments}


def encoder_inputs(model: PreTrainedModel, image: ProcessedImage) -> dict[str, Any]:
    """Arguments of a model's image encoder, on its device and in its dtype."""
    base: Any = model.base_model
    if hasattr(base, "rope_deltas"):
        base.rope_deltas = None  # reset the state of an earlier prompt
    return {name: placed(x, model.device, model.dtype) for name, x in image.inputs.items()}


def placed(given: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A processor's output on a device, with floats in this dtype."""
    if not isinstance(given, Tensor):
        return given
    return given.to(device, dtype) if given.is_floating_point() else given.to(device)


def _worst(sequence: Sequence, found: dict[str, list[Tensor]], scores: Tensor) -> float:
    theirs = scores[sequence.num_prompt_tokens - 1 :].float()
    ours = torch.stack(found[sequence.request_id]).float()
    return float((ours - theirs).abs().max() / theirs.std())


def _make_sequences(runner: Any, token_ids: list[int]) -> list[Sequence]:
    """One sequence with ascending blocks from the start of the pool, one with descending blocks from its end."""
    generator = torch.Generator().manual_seed(0)
    free = list(range(runner.num_blocks))
    share = runner.num_blocks // len(LENGTHS) * runner.block_size
    sequences = []
    for number, wanted in enumerate(LENGTHS):
        length = min(wanted, share - NUM_SAMPLED, runner.max_model_len - NUM_SAMPLED)
        places = torch.randint(len(token_ids), (length,), generator=generator)
        ids = torch.tensor(token_ids)[places]
        sequence = Sequence(
            f"self-check-{number}", ids.tolist(), length, SamplingParams(temperature=0)
        )
        num_blocks = -(-(length + NUM_SAMPLED) // runner.block_size)
        sequence.block_ids = [free.pop(-1 if number else 0) for _ in range(num_blocks)]
        sequences.append(sequence)
    return sequences


def _sample(runner: Any, sequences: list[Sequence], chunk: int = CHUNK) -> dict[str, list[Tensor]]:
    """Greedy decoding in chunks; returns the logits of each token."""
    scores: dict[str, list[Tensor]] = {sequence.request_id: [] for sequence in sequences}
    while unfinished := [s for s in sequences if s.num_output_tokens < NUM_SAMPLED]:
        items = [ScheduledSequence(s, _share(s, chunk)) for s in unfinished]
        items.sort(key=lambda item: item.num_new_tokens != 1)
        for item, row in zip(items, runner.logits(items), strict=True):
            item.sequence.num_computed_tokens = item.end
            if item.samples:
                scores[item.sequence.request_id].append(row)
                item.sequence.token_ids.append(int(row.argmax()))
    for sequence in sequences:
        runner.release(sequence.request_id)
    return scores


def _share(sequence: Sequence, chunk: int) -> int:
    """The number of tokens of a chunk, extended to complete images."""
    end = sequence.num_computed_tokens + min(chunk, sequence.num_pending_tokens)
    for image in sequence.images:
        if image.is_whole and image.offset < end < image.offset + image.num_tokens:
            end = image.offset + image.num_tokens
    return end - sequence.num_computed_tokens
