"""LLaVA: images are encoded, projected, and put into their slots among the token embeddings.

Used by the runner; the loader calls `map_state_dict`. It must not know caches, batches or requests.

Parameter names are those of the published `llava-hf` files (`language_model.model.layers...`,
`language_model.lm_head.weight`, `multi_modal_projector.linear_1...`), but for the vision tower's, which are
open_clip's, under `vision_tower.clip`.

Shape letters: N tokens, B images, P tokens of a image, C decoder width.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from engines.torch_backend.models.config import VLMConfig
from engines.torch_backend.models.llama import Llama
from engines.torch_backend.models.projector import Projector
from engines.torch_backend.models.vision import VisionTower, map_vision_weights, num_blocks_needed


@dataclass(frozen=True, slots=True)
class ImageSlots:
    """A run of image slots among the tokens of a step, and the features that fill it."""

    start: int
    features: Tensor  #: (number of slots, C)


class Llava(nn.Module):
    """Vision tower, projector and decoder."""

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

    def encode_images(self, pixels: Tensor) -> Tensor:
        """What the decoder sees of images. Shapes: (B, 3, size, size); returns (B, P, C)."""
        return self.multi_modal_projector(self.vision_tower(pixels))

    def embed(self, token_ids: Tensor, images: list[ImageSlots]) -> Tensor:
        """Token embeddings, with image features in their slots. Shapes: (N,); returns (N, C)."""
        embeddings = self.language_model.embed(token_ids)
        for image in images:
            stop = image.start + image.features.shape[0]
            embeddings[image.start : stop] = image.features
        return embeddings


def map_state_dict(weights: dict[str, Tensor], config: VLMConfig) -> dict[str, Tensor]:
    """A checkpoint's weights by this model's names; what the model does not read is left out.

    All namings of `LlavaForConditionalGeneration` are read: the published files', those of transformers 5
    (`model.language_model...`), and its mixture (`vision_tower.encoder...`, without `vision_model`).
    Raises: UnsupportedCheckpoint.
    """
    vision: dict[str, Tensor] = {}
    mapped: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        name = _published_name(name)
        if name.startswith("vision_tower."):
            vision[name.removeprefix("vision_tower.").removeprefix("vision_model.")] = tensor
        elif not _is_unread(name, config):
            mapped[name] = tensor
    depth = num_blocks_needed(config.vision, config.vision_feature_layers)
    for name, tensor in map_vision_weights(vision, depth).items():
        mapped[f"vision_tower.clip.{name}"] = tensor
    return mapped


def _published_name(name: str) -> str:
    """The name in the published files of a parameter that transformers 5 may have named anew."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.", 1)
    return name.removeprefix("model.")


def _is_unread(name: str, config: VLMConfig) -> bool:
    """Whether a decoder parameter is derived from others: old files hold rotary frequencies, tied heads."""
    is_tied_head = config.text.tie_word_embeddings and name == "language_model.lm_head.weight"
    return is_tied_head or name.endswith(".rotary_emb.inv_freq")
