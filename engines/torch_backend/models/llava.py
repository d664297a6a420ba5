"""LLaVA: CLIP's tower and a projector compute image features, which fill slots in a LLaMA decoder's prompt.

Parameter names are those of the published `llava-hf` files (`language_model.model.layers...`,
`multi_modal_projector.linear_1...`), except that names in the vision tower lack `vision_model`.

Shape letters: N tokens, B images, P tokens of an image, C decoder width.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from engines.core.runner import NO_LIMITS, PixelLimits
from engines.core.sequence import ImageInput
from engines.packages.checkpoint_json import Fields, shown
from engines.text.chat_template import LLAVA_TEMPLATE
from engines.text.processor import Item, MultimodalProcessor
from engines.torch_backend.layers.activation import ACTIVATIONS
from engines.torch_backend.layers.linear import Linear
from engines.torch_backend.layers.linear_group import LinearGroup
from engines.torch_backend.models.config import TextConfig, VisionConfig
from engines.torch_backend.models.hf_config import (
    build_config,
    check_clip,
    check_llama,
    clip_config,
    llama_config,
)
from engines.torch_backend.models.llama import Llama
from engines.torch_backend.models.registry import FamilyModel
from engines.torch_backend.models.vision import VisionTower, block_numbers
from engines.torch_backend.multimodal.image_processor import ImageProcessor, load_image_processor
from engines.torch_backend.ops.linear.reference import Prologue
from engines.torch_backend.ops.registry import Ops

_ARCHITECTURE = "LlavaForConditionalGeneration"
_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu")
_BLOCK = re.compile(r"encoder\.layers\.(\d+)\.")
_UNREAD = ("post_layernorm.", "embeddings.position_ids")  #: unused weights of the vision tower


@dataclass(frozen=True, slots=True)
class VLMConfig:
    vision: VisionConfig
    text: TextConfig
    image_token_id: int
    vision_feature_layers: tuple[int, ...]  #: as in the checkpoint: -2 is the second to last
    vision_feature_select_strategy: Literal["default", "full"]  #: default drops the class token
    projector_hidden_act: str = "gelu"
    projector_bias: bool = True

    @property
    def tokens_per_image(self) -> int:
        return self.vision.num_patches + (self.vision_feature_select_strategy == "full")


class Projector(nn.Module):
    """Image features to embeddings: two linear layers with an activation. Source: Liu et al. 2023, 3.2."""

    def __init__(self, config: VLMConfig) -> None:
        super().__init__()
        width = config.vision.hidden_size * len(config.vision_feature_layers)
        inner, bias = config.text.hidden_size, config.projector_bias
        self.linear_1 = Linear(width, inner, bias=bias, quantizable="int8")
        self.linear_2 = Linear(inner, inner, bias=bias, quantizable="int8")
        activation = Prologue(activation=ACTIVATIONS[config.projector_hidden_act])
        self._first = LinearGroup(self.linear_1)
        self._second = LinearGroup(self.linear_2, before=activation)

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        for linear in (self._first, self._second):
            linear.bind(ops, dtype)

    def forward(self, features: Tensor) -> Tensor:
        """Shapes: (B, P, layers * vision width); returns (B, P, decoder width)."""
        return self._second.forward(self._first.forward(features))


class Llava(FamilyModel):
    config: VLMConfig

    def __init__(self, config: VLMConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_tower = VisionTower(
            config.vision,
            config.vision_feature_layers,
            with_class_token=config.vision_feature_select_strategy == "full",
        )
        self.multi_modal_projector = Projector(config)
        self.language_model = Llama(config.text)

    def num_features(self, image: ImageInput) -> int | None:
        """Tokens of an image; None unless it is a square of the tower's size."""
        size = self.config.vision.image_size
        is_square = tuple(image.pixels.shape) == (3, size, size)
        return self.config.tokens_per_image if is_square else None

    def example_image(self) -> ImageInput:
        size = self.config.vision.image_size
        pixels = torch.zeros(3, size, size)
        return ImageInput(0, self.config.tokens_per_image, "example", pixels)


class LlavaProcessor(MultimodalProcessor):
    """Resizes every image to one square with a fixed number of tokens."""

    def __init__(self, images: ImageProcessor, slot_id: int, image_tokens: int) -> None:
        super().__init__(LLAVA_TEMPLATE)
        self.slot_id = slot_id
        self.images = images
        self._image_tokens = image_tokens

    @property
    def image_tokens(self) -> int:
        return self._image_tokens

    def process(self, image: Image.Image, pixels: PixelLimits = NO_LIMITS) -> np.ndarray:
        """Shapes: returns (3, size, size) float32."""
        return self.images.process(image)

    def items(self, images: Sequence[tuple[str, Any]], slot: str) -> list[Item]:
        """The same number of slots for each image."""
        text = slot * self.image_tokens
        return [Item(name, self.image_tokens, pixels, text) for name, pixels in images]


class LlavaFamily:
    """LLaVA 1.5 and models with its architecture."""

    architectures = (_ARCHITECTURE,)
    model_type = "llava"

    def check(self, config: Fields) -> VLMConfig:
        """Accepts CLIP's tower, two linear layers and a LLaMA-family decoder. Raises: UnsupportedCheckpoint."""
        kind = config.get("model_type", "llava")
        if kind != "llava":
            raise config.refuse("model_type", f"is {shown(kind)}, but {_ARCHITECTURE} is 'llava'")
        text_part, vision_part = config.section("text_config"), config.section("vision_config")
        check_llama(text_part)
        check_clip(vision_part)
        config.one_of("vision_feature_select_strategy", ("default", "full"))
        config.one_of("projector_hidden_act", _ACTIVATIONS)
        config.flag("multimodal_projector_bias")
        _check_ids(config)
        full: Any = build_config(config, "llava")
        text = llama_config(text_part, full.text_config, bool(full.tie_word_embeddings))
        vision = clip_config(vision_part, full.vision_config)
        given = full.vision_feature_layer
        layers = tuple(given) if isinstance(given, list | tuple) else (given,)
        block_numbers(vision, layers)  # refuses layers that the tower lacks
        if full.image_token_index >= text.vocab_size:
            raise config.refuse(
                "image_token_index",
                f"{full.image_token_index} is not below the vocabulary size {text.vocab_size}",
            )
        return VLMConfig(
            vision=vision,
            text=text,
            image_token_id=full.image_token_index,
            vision_feature_layers=layers,
            vision_feature_select_strategy=full.vision_feature_select_strategy,
            projector_hidden_act=full.projector_hidden_act,
            projector_bias=full.multimodal_projector_bias,
        )

    def build(self, config: VLMConfig) -> Llava:
        return Llava(config)

    def rename(self, name: str, config: VLMConfig) -> str | None:
        """Accepts published names, names of transformers 5 (`model.language_model...`), and mixed names
        (`vision_tower.encoder...`, without `vision_model`).
        """
        name = _published_name(name)
        if name.startswith("vision_tower."):
            short = name.removeprefix("vision_tower.").removeprefix("vision_model.")
            return _vision_name(short, config)
        is_tied_head = config.text.tie_word_embeddings and name == "language_model.lm_head.weight"
        # Old files also store derived weights: rotary frequencies and tied heads.
        return None if is_tied_head or name.endswith(".rotary_emb.inv_freq") else name

    def processor(self, directory: Path, config: VLMConfig) -> LlavaProcessor:
        images = load_image_processor(directory, config.vision.image_size)
        return LlavaProcessor(images, config.image_token_id, config.tokens_per_image)


FAMILY = LlavaFamily()


def _check_ids(config: Fields) -> None:
    for name in ("image_token_id", "image_token_index"):
        config.whole(name, at_least=0, at_most=2**31)
    layers = config.get("vision_feature_layer", -2)
    given = layers if isinstance(layers, list) else [layers]
    if not 1 <= len(given) <= 512 or any(type(layer) is not int for layer in given):
        raise config.refuse("vision_feature_layer", f"is {shown(layers)}; list 1 to 512 layers")


def _published_name(name: str) -> str:
    """The published name of a parameter that transformers 5 can have renamed."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.", 1)
    return name.removeprefix("model.")


def _vision_name(name: str, config: VLMConfig) -> str | None:
    """The name of a parameter of CLIP's tower. None for layers after the last one that is used."""
    block = _BLOCK.match(name)
    depth = max(block_numbers(config.vision, config.vision_feature_layers))
    is_unread = name.startswith(_UNREAD) or (block is not None and int(block[1]) >= depth)
    return None if is_unread else f"vision_tower.{name}"
