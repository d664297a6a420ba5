"""Reads a checkpoint's `config.json` with transformers' classes, and removes unsafe fields.

No code of a checkpoint is run, nothing is fetched, and sizes are checked before anything is built.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from engines.packages.checkpoint_json import Fields, shown
from engines.torch_backend.models.config import TextLimits, UnsupportedCheckpoint
from engines.torch_backend.models.hf_config import MAX_WHOLE
from engines.torch_backend.multimodal.transformers_audio import TAKES_AUDIO

#: Fields that would make transformers fetch kernels, files or code, or change how it loads.
_NEVER_READ = frozenset({
    "auto_map", "attn_implementation", "experts_implementation", "transformers_weights", "fusion_config", "kernel_config",
    "distributed_config", "custom_pipelines", "dtype", "torch_dtype", "torchscript", "output_attentions",
    "output_hidden_states", "return_dict", "name_or_path", "use_cache", "gradient_checkpointing", "quantization_config",
})  # fmt: skip
#: Names of timm's models, which may have a source before a colon.
_TIMM_NAMES = frozenset({"architecture", "backbone"})
_FLOAT = "__float__"
#: The section of the part that generates text, by model type.
_GENERATING = {"qwen2_5_omni": "thinker_config"}


@dataclass(frozen=True)
class GenericConfig:
    model_class: type[PreTrainedModel]
    full: PreTrainedConfig
    text: TextLimits

    @property
    def kind(self) -> str:
        """The class, with the decoder's type for models with a tower, as in `TESTED`."""
        name, text = self.model_class.__name__, self.full.get_text_config(decoder=True)
        return f"{name}/{text.model_type}" if self.takes_media else name

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images."""
        return self.model_class.__name__ in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()

    @property
    def takes_media(self) -> bool:
        """Whether the model has a tower for images or audio."""
        return self.takes_images or self.model_class.__name__ in TAKES_AUDIO


def find_class(config: Fields) -> type[PreTrainedModel] | None:
    """The class in a `config.json`, if it generates text in the installed transformers."""
    part = _generating(config)
    # published parts name architectures that transformers lacks
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
    """Raises: UnsupportedCheckpoint, with the field and the reason."""
    config = _generating(config)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise config.refuse("model_type", f"{shown(kind)} is unknown to transformers")
    config_class = CONFIG_MAPPING[kind]
    expected = model_class.config_class
    if expected is None or not issubclass(config_class, expected):
        raise config.refuse(
            "model_type", f"{shown(kind)} is not the type of the class {model_class.__name__}"
        )
    try:
        full = config_class(**_believed(config))
    except UnsupportedCheckpoint:
        raise
    except Exception as error:  # of any type, for inconsistent values
        reason = " ".join(str(error).split()).rpartition("Error: ")[2][:200]
        raise UnsupportedCheckpoint(f"{config.file}: {reason}") from None
    return GenericConfig(model_class, full, _limits(config, full))


def _generating(config: Fields) -> Fields:
    """The section of the part that generates text; for most models, the whole `config.json`."""
    kind = config.get("model_type")
    name = _GENERATING.get(kind) if isinstance(kind, str) else None
    return config if name is None else config.section(name)


def _believed(section: Fields) -> dict[str, Any]:
    """The fields of a section and its subsections, without unsafe ones. Raises: UnsupportedCheckpoint."""
    for name, most in MAX_WHOLE.items():
        given = section.get(name)
        for size in given if isinstance(given, list) else [given]:
            if size is not None and (type(size) is not int or not 0 <= size <= most):
                raise section.refuse(name, f"is {shown(size)}, not an integer from 0 to {most}")
    values: dict[str, Any] = {}
    for name, value in section.values.items():
        if name.startswith("_") or name in _NEVER_READ:
            continue
        if name in _TIMM_NAMES and ":" in str(value):
            raise section.refuse(
                name, f"is {shown(value)}, which timm would fetch or read elsewhere"
            )
        if name == "model_args" and not _are_sizes(value):
            raise section.refuse(name, f"is {shown(value)}, but only numbers by name are read")
        is_section = isinstance(value, Mapping) and value.keys() != {_FLOAT}
        values[name] = _believed(section.section(name)) if is_section else _number(value)
    return values


def _are_sizes(value: Any) -> bool:
    """Whether timm's arguments are numbers: others name files, or what to fetch."""
    if value is None:
        return True
    return isinstance(value, Mapping) and all(isinstance(x, int | float) for x in value.values())


def _number(value: Any) -> Any:
    """Convert infinite values from the form in which transformers writes them to JSON."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    if isinstance(value, Mapping) and value.keys() == {_FLOAT}:
        return {"Infinity": math.inf, "-Infinity": -math.inf}.get(str(value[_FLOAT]), math.nan)
    return value


def _limits(config: Fields, full: PreTrainedConfig) -> TextLimits:
    text: Any = full.get_text_config(decoder=True)
    sizes: dict[str, int] = {}
    for name in ("vocab_size", "max_position_embeddings"):
        size = getattr(text, name, None)
        if type(size) is not int or size < 1:
            raise config.refuse(name, f"is {shown(size)}, not a positive integer")
        sizes[name] = size
    return TextLimits(**sizes)
