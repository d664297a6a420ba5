"""The minimum bytes and operations of a step, from which the roofline ratio is computed.

Counts are determined by the model's shape and the step's tokens. Norms, rotations, sampling and
copies are not counted, because a better engine could avoid them.
"""

from dataclasses import dataclass

import torch

from engines.core.sequence import Batch
from engines.torch_backend.models.config import TextConfig
from engines.torch_backend.models.llava import Llava, VLMConfig


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to read and floating-point operations (a multiply-add is two)."""

    num_bytes: float = 0.0
    num_flops: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)

    def least_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Minimum time on a machine that reads and multiplies at the same time, each at its measured rate."""
        return max(self.num_bytes / bytes_per_s, self.num_flops / flops_per_s)


class ModelCost:
    def __init__(self, model: Llava, kv_dtype: torch.dtype) -> None:
        text = model.config.text
        decoder = model.language_model
        head = decoder.model.embed_tokens if decoder.lm_head is None else decoder.lm_head
        self._head_bytes = _num_bytes(head)
        self._layer_bytes = _num_bytes(decoder.model.layers)
        self._vision_bytes = _num_bytes(model.vision_tower) + _num_bytes(
            model.multi_modal_projector
        )
        self._layer_flops = 2 * text.num_layers * _layer_values(text)
        self._head_flops = 2 * text.vocab_size * text.hidden_size
        self._attention_flops = 4 * text.num_layers * text.num_heads * text.head_dim
        self._kv_bytes = 2 * text.num_layers * text.num_kv_heads * text.head_dim * kv_dtype.itemsize
        self._image_flops = image_flops(model.config)

    def step(self, batch: Batch, num_images: int) -> Work:
        """The work of a step that also encodes this many images."""
        num_tokens = batch.num_tokens
        num_sampled = sum(item.samples for item in batch.items)
        context = seen = 0
        for item in batch.items:
            start, new = item.start, item.num_new_tokens
            context += start + new
            seen += new * start + new * (new + 1) // 2  # the i-th new token sees start + i tokens
        work = Work(
            self._layer_bytes + self._kv_bytes * context,
            self._layer_flops * num_tokens + self._attention_flops * seen,
        )
        if num_sampled:
            work += Work(self._head_bytes, self._head_flops * num_sampled)
        if num_images:
            work += Work(self._vision_bytes, self._image_flops * num_images)
        return work


def image_flops(config: VLMConfig) -> int:
    vision, width = config.vision, config.text.hidden_size
    num_tokens = vision.num_patches + 1
    block = 4 * vision.hidden_size**2 + 2 * vision.hidden_size * vision.intermediate_size
    attention = 2 * num_tokens * vision.hidden_size
    patches = 3 * vision.patch_size**2 * vision.hidden_size
    depth = max(i if i >= 0 else vision.num_layers + 1 + i for i in config.vision_feature_layers)
    projector = vision.hidden_size * len(config.vision_feature_layers) * width + width**2
    tower = num_tokens * depth * (block + attention) + vision.num_patches * patches
    return 2 * (tower + config.tokens_per_image * projector)


def _layer_values(text: TextConfig) -> int:
    heads = 2 * text.num_heads + 2 * text.num_kv_heads
    return text.hidden_size * (heads * text.head_dim + 3 * text.intermediate_size)


def _num_bytes(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())
