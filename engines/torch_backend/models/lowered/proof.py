"""Compares this project's decoder with transformers' by computing both.

Shape letters: T tokens of the trial, R rows of positions, C hidden width.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from engines.torch_backend.kv_cache import KVCachePool
from engines.torch_backend.layers.linear_group import Stream
from engines.torch_backend.models.config import BeyondOurProgram
from engines.torch_backend.models.generic.rope import batched
from engines.torch_backend.models.generic.watched import Call, first_of, watching
from engines.torch_backend.models.llama import Llama
from engines.torch_backend.models.lowered.rotary import Rotary
from engines.torch_backend.ops.paged_attention.reference import create_attention
from engines.torch_backend.step import SequenceRows, StepInputs

#: Largest error of a layer's output relative to its standard deviation, in float32.
_LARGEST_DIFFERENCE = 1e-3
_TRIAL_TOKENS = (1, 5, 2, 7, 3, 4, 9, 6)
_BLOCK_SIZE = 4
LARGE = 2**29  # parameters; larger models are compared on some layers only
#: Arguments of the decoder that carry only tokens and their positions.
_PLAIN_INPUTS = frozenset({
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache", "cache_position",
    "output_attentions", "output_hidden_states", "return_dict",
})  # fmt: skip


@dataclass
class Observed:
    """Inputs and outputs of transformers' layers in one call of the model."""

    positions: Tensor  #: (R, T)
    calls: list[Call]


@torch.inference_mode()
def observe(front: Any, stack: Any) -> Observed:
    """Check that nothing is computed between embeddings, layers, norm and head. Raises: BeyondOurProgram."""
    model: Any = front.inner
    ids = torch.tensor([_TRIAL_TOKENS], device=stack.embed_tokens.weight.device)
    # a single row of positions must increase by 1: transformers would treat jumps as packed prompts
    steps = torch.arange(1, front.num_position_rows + 1)[:, None]
    positions = (steps * torch.arange(ids.shape[1]) + 3).to(ids.device)
    head = model.get_output_embeddings()
    with watching(model) as watched, _wide_scores(head) as scores:
        logits = model(
            input_ids=ids, position_ids=batched(positions), use_cache=False, **front.inputs(ids, [])
        ).logits
    for call in watched[stack]:
        odd = {name for name, x in call.kwargs.items() if isinstance(x, Tensor)} - _PLAIN_INPUTS
        if odd:
            raise BeyondOurProgram(
                f"the decoder has inputs besides tokens and positions: {', '.join(sorted(odd))}"
            )
    calls = [call for layer in stack.layers for call in watched[layer]]
    if len(calls) != len(stack.layers):
        raise BeyondOurProgram("layers are computed several times")
    ends = [watched[x][-1:] for x in (stack.embed_tokens, stack.norm, head)]
    if not all(ends):
        raise BeyondOurProgram("the model does not call its embeddings, its last norm or its head")
    [[embedded], [normed], [scored]] = ends
    outputs = [embedded.output, *(first_of(x.output) for x in calls), normed.output, scores[-1]]
    inputs = [*(x.input for x in calls), normed.input, scored.input, logits]
    layers = [f"layer {number}" for number in range(len(calls) - 1)]
    places = ["embeddings", *layers, "the last layer", "the last norm", "the head"]
    for place, left, right in zip(places, outputs, inputs, strict=True):
        if not torch.equal(left, right):
            raise BeyondOurProgram(f"the model computes something after {place}")
    return Observed(positions, calls)


@contextmanager
def _wide_scores(head: nn.Module) -> Iterator[list[Tensor]]:
    """Make a head return a wide range of scores, which reveals later changes. The list receives the scores."""
    given: list[Tensor] = []

    def give(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        scores = torch.linspace(-300, 300, output.numel(), device=output.device)
        given.append(scores.view_as(output).to(output.dtype))
        return given[-1]

    handle = head.register_forward_hook(give)
    try:
        yield given
    finally:
        handle.remove()


@torch.inference_mode()
def check_levels(seen: Observed, stack: Any) -> None:
    """Check that additional image features are added after the first layers."""
    if "deepstack_visual_embeds" not in inspect.signature(stack.forward).parameters:
        return
    x = seen.calls[0].input
    slots = torch.arange(x.shape[1], device=x.device)[None] % 3 == 1
    levels = list(torch.stack([x[slots], 2 * x[slots]]))
    with watching(stack) as watched:
        stack(
            inputs_embeds=x, position_ids=batched(seen.positions), use_cache=False, visual_pos_masks=slots,
            deepstack_visual_embeds=levels,
        )  # fmt: skip
    calls = [call for each in (*stack.layers, stack.norm) for call in watched[each]]
    for number, (call, following) in enumerate(pairwise(calls)):
        expected: Any = call.copied
        if number < len(levels):
            expected[slots] += levels[number]
        if not torch.equal(expected, following.input):
            raise BeyondOurProgram(f"image features are not added after layer {number}")


@torch.inference_mode()
def compare(seen: Observed, decoder: Llama, rotary: Rotary, stack: Any) -> None:
    """Compare the output of each layer in float32. In a large model, compare one layer of each kind, and the last."""
    text, device = decoder.text, seen.positions.device
    num_tokens = seen.positions.shape[1]
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    rows = SequenceRows(0, num_tokens, 0, list(range(num_blocks)))
    inputs = StepInputs.create([rows], _BLOCK_SIZE, device)
    pool = KVCachePool(text, num_blocks, _BLOCK_SIZE, torch.float32, device)
    loaded = stack.embed_tokens.weight.dtype  # transformers rounds the angles to it
    positions = seen.positions[0] if len(seen.positions) == 1 else seen.positions
    table = rotary.table(int(positions.max()) + 1, loaded, device)
    rotation = tuple(x.float() for x in table.at_all(positions))
    attend = create_attention(text.num_heads, pool, inputs, (rotation[0], rotation[1]))
    pairs: list[tuple[Any, Any, Any]] = list(
        zip(stack.layers, decoder.model.layers, seen.calls, strict=True)
    )
    is_large = sum(x.numel() for x in stack.parameters()) > LARGE
    rotations: dict[str, tuple[bool, int]] = {}  # by kind of layer
    ways = [*((True, rope) for rope in range(rotary.num_tables)), (False, 0)]
    for number, (theirs, ours, call) in enumerate(pairs):
        angles = id(call.kwargs.get("position_embeddings"))
        kind = f"{_kind_of(theirs)} {ours.self_attn.heads.window} {angles}"
        if is_large and kind in rotations and number < len(pairs) - 1:
            _set_rotation(ours, *rotations[kind])
            continue
        same = theirs if loaded == torch.float32 else deepcopy(theirs).float()
        output = first_of(same(*_widened(call.args), **_widened(call.kwargs)))[0]
        x = _widened(call.input)[0]
        found = []
        for way in ways:
            _set_rotation(ours, *way)
            stream = Stream(x)
            ours(stream, attend)
            rounding = 8 * torch.finfo(torch.float32).eps * output.abs()
            excess = ((stream.tensor() - output).abs() - rounding).max()
            found.append(float(excess / (output - x).std()))
            if found[-1] <= _LARGEST_DIFFERENCE:
                rotations[kind] = way
                break
        else:
            raise BeyondOurProgram(
                f"the output of layer {number} differs from ours by {min(found):.1e} standard deviations"
            )


def _set_rotation(layer: Any, rotates: bool, rope: int) -> None:
    attention = layer.self_attn
    if (attention.heads.rotates, attention.heads.rope) != (rotates, rope):
        attention.heads = replace(attention.heads, rotates=rotates, rope=rope)


def _kind_of(layer: nn.Module) -> str:
    """Module types of a layer and its plain attributes without its index."""
    return repr([
        (name, type(module), {
            n: x for n, x in sorted(vars(module).items())
            if isinstance(x, bool | int | float | str) and n != "layer_idx"
        })
        for name, module in layer.named_modules()
    ])  # fmt: skip


def _widened(given: Any) -> Any:
    """Arguments with tensors in float32."""
    return tree_map_only(Tensor, lambda x: x.float() if x.is_floating_point() else x, given)
