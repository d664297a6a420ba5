"""Runs the decoder of a transformers model as a `Llama`, as fast as native models.

Transformers' configuration, image processor, tower, merging of embeddings, rotary frequencies and position hooks stay
in use; they are called the front. The decoder is recognised by its modules and by the attention that its layers
requested in the probe, not by its name. Each layer of both decoders is then run on the same input. If the outputs
differ, the model stays generic, and the reason is logged.

`reading` creates the `Llama`, `rotary` its table of angles, and `proof` compares both decoders.

Shape letters: N tokens of a step, C hidden width.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from engines.core.sequence import ImageInput
from engines.torch_backend.layers.linear import QuantizedMethod, quantizable_layers
from engines.torch_backend.layers.rotary import RotaryTable
from engines.torch_backend.models.config import BeyondOurProgram
from engines.torch_backend.models.generic.linears import allow_int8, bind_layers
from engines.torch_backend.models.generic.rope import batched, freeze_rope
from engines.torch_backend.models.llama import Llama
from engines.torch_backend.models.lowered.proof import check_levels, compare, observe
from engines.torch_backend.models.lowered.reading import (
    find_stack,
    order_of_pairs,
    read_decoder,
    stored_rows,
)
from engines.torch_backend.models.lowered.rotary import Rotary
from engines.torch_backend.models.registry import FamilyModel
from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.step import ImageSlots


def lower(front: Any, dtype: torch.dtype) -> "LoweredModel":
    """Replace the decoder of a probed `GenericModel` by a `Llama`. Raises: BeyondOurProgram, without changes."""
    stack_name, stack = find_stack(front.inner)
    for module in front.inner.modules():
        # drop the probe: it references all layers, so a copy of one layer would copy them all
        module.pages = None
    width = read_decoder(front, stack, dtype).text.head_dim
    rotary = Rotary(stack.rotary_emb, front.num_position_rows, width)
    with front.as_transformers_does():
        seen = observe(front, stack)
        check_levels(seen, stack)
        refusals: list[BeyondOurProgram] = []
        for are_neighbours in (False, True):
            order = order_of_pairs(rotary.num_rotated, width, are_neighbours)
            decoder = read_decoder(front, stack, dtype, order)
            try:
                compare(seen, decoder, rotary, stack)
            except BeyondOurProgram as refusal:
                refusals.append(refusal)
            else:
                return LoweredModel(front, stack_name, decoder, rotary, order, dtype)
    raise refusals[0]


class LoweredModel(FamilyModel):
    """Transformers' image encoder and merging of embeddings, with this project's decoder."""

    converts_weights = True
    speed_path = "lowered"

    def __init__(
        self,
        front: Any,
        stack_name: str,
        decoder: Llama,
        rotary: Rotary,
        order: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """Removes the decoder from transformers' model, which cannot be used alone afterwards.

        `order` is the order of channels of queries and keys in each head, if it was changed.
        """
        super().__init__()
        self.config = front.config
        self.language_model = decoder
        self._rotary = rotary
        self._order = order
        self._inputs = _DecoderInputs(decoder)
        self.front: Any = None
        self._stack_name = stack_name
        if front.config.takes_media:
            front.inner.set_submodule(stack_name, self._inputs)
            front.inner.set_output_embeddings(nn.Identity())
            _convert(front.inner, dtype)
            front.specs = {}  # would keep the layers and their weights alive
            self.front = front

    def rotary(self, max_positions: int, dtype: torch.dtype, device: torch.device) -> RotaryTable:
        freeze_rope(self._rotary.module, max_positions)
        return self._rotary.table(max_positions, dtype, device)

    def stored_rows(self, name: str) -> Mapping[str, Tensor | None]:
        """Rows of joined layers are split, and rows of queries and keys are reordered."""
        return stored_rows(name, self.language_model.text, self._order)

    def quantize(self, scheme: QuantizedMethod, dtype: torch.dtype) -> None:
        """Quantize the decoder's linear layers, with scales in the dtype of the weights."""
        for layer in quantizable_layers(self.language_model, scheme):
            layer.quantize(scheme, layer.weight.dtype)

    def allow_int8_beside(self) -> None:
        if self.front is not None:
            allow_int8(self.front.inner, self._stack_name, None)

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        super().bind(ops, dtype)
        if self.front is not None:
            bind_layers(self.front.inner, ops, dtype)

    def embed(self, token_ids: Tensor, images: Sequence[ImageSlots]) -> Tensor:
        """Embeddings of tokens and images, merged by transformers. Shapes: (N,); returns (N, C)."""
        if not images:
            return self.language_model.embed(token_ids)
        ids = token_ids[None]
        positions = batched(ids.new_zeros(self.front.num_position_rows, ids.shape[1]))
        self.front.inner(
            input_ids=ids, position_ids=positions, use_cache=False, **self.front.inputs(ids, images)
        )
        found = self._inputs.taken()
        for image in images:
            if image.kind == "audio":
                image.place(found)
        return found

    def num_features(self, image: ImageInput) -> int | None:
        return None if self.front is None else self.front.num_features(image)

    def encode(
        self, images: Sequence[ImageInput], device: torch.device, dtype: torch.dtype
    ) -> list[Tensor]:
        """Shapes: returns (slots, C) each."""
        return self.front.encode(images, device, dtype)


class _DecoderInputs(nn.Module):
    """Replaces transformers' decoder and records its inputs."""

    def __init__(self, decoder: Llama) -> None:
        super().__init__()
        self.embed_tokens = _Embeddings(decoder)
        self._given: tuple[Tensor, Tensor | None, Sequence[Tensor]] | None = None

    def get_input_embeddings(self) -> nn.Module:
        """Called by transformers' models."""
        return self.embed_tokens

    def taken(self) -> Tensor:
        """Last call's embeddings, and features added after the first layers. Shapes: (N, C), or (N, C + levels * C)."""
        assert self._given is not None
        (embeddings, slots, levels), self._given = self._given, None
        columns = [embeddings]
        for level in levels if slots is not None else ():
            columns.append(torch.zeros_like(embeddings))
            columns[-1][slots] = level.to(embeddings.dtype)
        return torch.cat(columns, dim=1) if len(columns) > 1 else embeddings

    def forward(
        self,
        inputs_embeds: Tensor,
        visual_pos_masks: Tensor | None = None,
        deepstack_visual_embeds: Sequence[Tensor] | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """Shapes: (1, N, C), (1, N) and levels of (slots, C) each."""
        slots = None if visual_pos_masks is None else visual_pos_masks[0]
        self._given = inputs_embeds[0], slots, deepstack_visual_embeds or ()
        hidden: Any = inputs_embeds
        return BaseModelOutputWithPast(last_hidden_state=hidden)


class _Embeddings(nn.Module):
    def __init__(self, decoder: Llama) -> None:
        super().__init__()
        self._decoder = (decoder,)  # in a tuple, so that its weights are not counted twice

    def forward(self, token_ids: Tensor) -> Tensor:
        """Shapes: (1, N); returns (1, N, C)."""
        return self._decoder[0].embed(token_ids[0])[None]


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert parameters of lower precision to `dtype`. Float32 parameters of transformers are not changed."""
    for x in (*model.parameters(), *model.buffers()):
        if x.is_floating_point() and x.dtype.itemsize < dtype.itemsize:
            x.data = x.data.to(dtype)
