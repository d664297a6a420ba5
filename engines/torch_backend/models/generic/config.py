"""Finds the transformers class of a checkpoint, and reads its configuration."""

from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from engines.packages.checkpoint_json import Fields, shown
from engines.torch_backend.models.config import TextLimits
from engines.torch_backend.models.hf_config import build_config
from engines.torch_backend.multimodal.transformers_audio import TAKES_AUDIO

#: Configuration section of the part that generates text, by model type.
_GENERATING = {"qwen2_5_omni": "thinker_config"}


@dataclass(frozen=True)
class GenericConfig:
    model_class: type[PreTrainedModel]
    full: PreTrainedConfig
    text: TextLimits

    @property
    def kind(self) -> str:
        """Key of `TESTED` in tested.py: the class, and for models with a tower also the decoder's type."""
        name, text = self.model_class.__name__, self.full.get_text_config(decoder=True)
        return f"{name}/{text.model_type}" if self.takes_media else name

    @property
    def takes_images(self) -> bool:
        return self.model_class.__name__ in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()

    @property
    def takes_media(self) -> bool:
        """Whether the model has a tower for images or audio."""
        return self.takes_images or self.model_class.__name__ in TAKES_AUDIO


def find_class(config: Fields) -> type[PreTrainedModel] | None:
    """The class that a `config.json` names, if the installed transformers has it for generating text."""
    part = _generating(config)
    # published sections name architectures that transformers lacks
    given = config.get("architectures") if part is config else None
    kind = part.get("model_type")
    by_kind = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    known = {*by_kind.values(), *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *TAKES_AUDIO}
    if given is None:
        name = by_kind.get(kind) if isinstance(kind, str) else None
    else:
        names = given if isinstance(given, list) else []
        name = next((name for name in names if isinstance(name, str) and name in known), None)
    return None if name is None else getattr(transformers, str(name))


def read_config(config: Fields, model_class: type[PreTrainedModel]) -> GenericConfig:
    config = _generating(config)
    full = build_config(config)
    expected = model_class.config_class
    if expected is None or not isinstance(full, expected):
        kind = shown(config.get("model_type"))
        raise config.refuse(
            "model_type", f"{kind} is not the type of the class {model_class.__name__}"
        )
    return GenericConfig(model_class, full, _limits(config, full))


def _generating(config: Fields) -> Fields:
    """The section of the part that generates text; for most models, the whole `config.json`."""
    kind = config.get("model_type")
    name = _GENERATING.get(kind) if isinstance(kind, str) else None
    return config if name is None else config.section(name)


def _limits(config: Fields, full: PreTrainedConfig) -> TextLimits:
    text: Any = full.get_text_config(decoder=True)
    sizes: dict[str, int] = {}
    for name in ("vocab_size", "max_position_embeddings"):
        size = getattr(text, name, None)
        if type(size) is not int or size < 1:
            raise config.refuse(name, f"is {shown(size)}, not a positive integer")
        sizes[name] = size
    return TextLimits(**sizes)
