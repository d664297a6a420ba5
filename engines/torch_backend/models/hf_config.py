"""A checkpoint's `config.json`, as Hugging Face's LlavaForConditionalGeneration writes it, made a `VLMConfig`.

Called by the loader. Knows no tensors.
"""

import json
from pathlib import Path
from typing import Any

from engines.torch_backend.models.config import (
    RopeScaling,
    TextConfig,
    UnsupportedCheckpoint,
    VisionConfig,
    VLMConfig,
)

_VISION_DEFAULTS = {  # of transformers' CLIPVisionConfig, for keys that a config.json leaves out
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_WHOLE_VISION_DEFAULT = {  # of transformers' LlavaConfig, for a config.json without a vision_config
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {  # of transformers' configurations of these families
    "llama": _LLAMA_DEFAULTS,
    "mistral": _LLAMA_DEFAULTS
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _LLAMA_DEFAULTS
    | {
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
}
#: who wrote a `quantization_config`
QUANT_METHOD = "vlm-fleet"
_SCHEMES = ("int8", "int4")
_TEXT_ACTIVATIONS = ("silu",)
_VISION_ACTIVATIONS = ("quick_gelu", "gelu")
_PROJECTOR_ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu")


def read_config(directory: Path) -> VLMConfig:
    """The configuration of a checkpoint. Raises: UnsupportedCheckpoint."""
    file = directory / "config.json"
    if not file.is_file():
        raise UnsupportedCheckpoint("the checkpoint has no config.json")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedCheckpoint(f"config.json is no JSON: {error}") from None
    return vlm_config_from_hf(content)


def vlm_config_from_hf(config: dict[str, Any]) -> VLMConfig:
    """Read a `config.json`; absent keys take the values that transformers gives them.

    Raises: UnsupportedCheckpoint, naming what this backend cannot run.
    """
    _check_architecture(config)
    text_section = _section(config, "text_config") or {}
    text = _text_config(text_section, tied=bool(config.get("tie_word_embeddings", False)))
    vision = _vision_config(_section(config, "vision_config"))
    strategy = config.get("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise UnsupportedCheckpoint(
            f"vision_feature_select_strategy {strategy!r} is unknown; 'default' and 'full' would do"
        )
    act = _one_of(config, "projector_hidden_act", "gelu", _PROJECTOR_ACTIVATIONS)
    return VLMConfig(
        vision=vision,
        text=text,
        image_token_id=_image_token_id(config, text.vocab_size),
        vision_feature_layers=_feature_layers(config, vision.num_layers),
        vision_feature_select_strategy=strategy,
        projector_hidden_act=act,
        projector_bias=bool(config.get("multimodal_projector_bias", True)),
        quantization=_stored_quantization(config),
    )


def _check_architecture(config: dict[str, Any]) -> None:
    architectures = config.get("architectures") or ["LlavaForConditionalGeneration"]
    kind = config.get("model_type", "llava")
    if kind != "llava" or "LlavaForConditionalGeneration" not in architectures:
        raise UnsupportedCheckpoint(
            f"the checkpoint is a {kind!r} ({', '.join(map(str, architectures))}); only "
            "LlavaForConditionalGeneration can be run, such as the checkpoints of llava-hf"
        )


def _stored_quantization(config: dict[str, Any]) -> str | None:
    """The scheme in which `vlm quantize` saved the weights; nobody else's can be read."""
    given = config.get("quantization_config")
    if not given:
        return None
    scheme = given.get("scheme") if isinstance(given, dict) else None
    if scheme not in _SCHEMES or given.get("quant_method") != QUANT_METHOD:
        raise UnsupportedCheckpoint(
            "the checkpoint is already quantized (quantization_config), and not by `vlm quantize`; take the "
            "full-precision one and ask for --quantization int8 or int4"
        )
    return scheme


def _section(config: dict[str, Any], name: str) -> dict[str, Any] | None:
    section = config.get(name)
    if section is not None and not isinstance(section, dict):
        raise UnsupportedCheckpoint(f"{name} in config.json is no object")
    return section


def _vision_config(section: dict[str, Any] | None) -> VisionConfig:
    given = _VISION_DEFAULTS | (_WHOLE_VISION_DEFAULT if section is None else section)
    kind = given.get("model_type", "clip_vision_model")
    if kind != "clip_vision_model":
        raise UnsupportedCheckpoint(f"the vision tower is a {kind!r}; only CLIP's can be run")
    if given.get("num_channels", 3) != 3:
        raise UnsupportedCheckpoint("the vision tower does not take RGB pictures")
    vision = VisionConfig(
        hidden_size=_count(given, "hidden_size"),
        intermediate_size=_count(given, "intermediate_size"),
        num_layers=_count(given, "num_hidden_layers"),
        num_heads=_count(given, "num_attention_heads"),
        image_size=_side(given, "image_size"),
        patch_size=_side(given, "patch_size"),
        hidden_act=_one_of(given, "hidden_act", "quick_gelu", _VISION_ACTIVATIONS),
        layer_norm_eps=float(given["layer_norm_eps"]),
    )
    if vision.hidden_size % vision.num_heads:
        raise UnsupportedCheckpoint("vision hidden_size is not a multiple of num_attention_heads")
    return vision


def _text_config(section: dict[str, Any], tied: bool) -> TextConfig:
    kind = section.get("model_type", "llama")
    if kind not in _TEXT_DEFAULTS:
        families = ", ".join(sorted(_TEXT_DEFAULTS))
        raise UnsupportedCheckpoint(f"the text model is a {kind!r}; these can be run: {families}")
    given = _TEXT_DEFAULTS[kind] | {k: v for k, v in section.items() if v is not None}
    num_heads = _count(given, "num_attention_heads")
    num_kv_heads = _count(given, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedCheckpoint("num_attention_heads is not a multiple of num_key_value_heads")
    hidden_size = _count(given, "hidden_size")
    bias = kind == "qwen2" or (kind == "llama" and bool(given["attention_bias"]))
    return TextConfig(
        vocab_size=_count(given, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(given, "intermediate_size"),
        num_layers=_count(given, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_count(given, "head_dim", default=hidden_size // num_heads),
        max_position_embeddings=_max_positions(kind, section, given),
        rms_norm_eps=float(given["rms_norm_eps"]),
        rope_theta=_rope_theta(given),
        rope_scaling=_rope_scaling(given),
        attention_bias=bias,
        attention_output_bias=bias and kind == "llama",
        mlp_bias=kind == "llama" and bool(given["mlp_bias"]),
        tie_word_embeddings=tied or bool(given["tie_word_embeddings"]),
        hidden_act=_one_of(given, "hidden_act", "silu", _TEXT_ACTIVATIONS),
    )


def _max_positions(kind: str, section: dict[str, Any], given: dict[str, Any]) -> int:
    """The context length. A sliding window shortens it: within the window attention is exactly full."""
    positions = _count(given, "max_position_embeddings")
    if kind == "qwen2" and not given.get("use_sliding_window"):
        return positions
    window = section.get("sliding_window", given.get("sliding_window"))
    return positions if window is None else min(positions, int(window))


def _rope_parameters(given: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings: `rope_parameters` of transformers 5, `rope_scaling` before."""
    parameters = given.get("rope_scaling") or given.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or any(isinstance(v, dict) for v in parameters.values()):
        raise UnsupportedCheckpoint("rope_parameters differ between layers; one set can be run")
    if parameters.get("partial_rotary_factor", given.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedCheckpoint("partial_rotary_factor other than 1 cannot be run")
    return parameters


def _rope_theta(given: dict[str, Any]) -> float:
    return float(_rope_parameters(given).get("rope_theta", given["rope_theta"]))


def _rope_scaling(given: dict[str, Any]) -> RopeScaling | None:
    parameters = _rope_parameters(given)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    try:
        if kind == "linear":
            return RopeScaling("linear", float(parameters["factor"]))
        if kind == "llama3":
            original = parameters.get(
                "original_max_position_embeddings", given["max_position_embeddings"]
            )
            return RopeScaling(
                "llama3",
                float(parameters["factor"]),
                float(parameters["low_freq_factor"]),
                float(parameters["high_freq_factor"]),
                int(original),
            )
    except KeyError as error:
        raise UnsupportedCheckpoint(f"rope scaling {kind!r} lacks {error}") from None
    raise UnsupportedCheckpoint(f"rope scaling {kind!r} cannot be run; 'linear' and 'llama3' can")


def _feature_layers(config: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    given = config.get("vision_feature_layer", -2)
    layers = tuple(given) if isinstance(given, list | tuple) else (given,)
    # Hidden states are the embeddings and then every layer's output.
    in_range = (isinstance(i, int) and -num_layers - 1 <= i <= num_layers for i in layers)
    if not layers or not all(in_range):
        raise UnsupportedCheckpoint(
            f"vision_feature_layer {given!r} does not name layers of a tower with {num_layers}"
        )
    return layers


def _image_token_id(config: dict[str, Any], vocab_size: int) -> int:
    token_id = config.get("image_token_index", config.get("image_token_id", 32000))
    if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
        raise UnsupportedCheckpoint(
            f"image_token_index {token_id!r} lies outside the vocabulary of {vocab_size}"
        )
    return token_id


def _count(given: dict[str, Any], name: str, default: int | None = None) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedCheckpoint(f"{name} in config.json is {value!r}, not a positive integer")
    return value


def _side(given: dict[str, Any], name: str) -> int:
    """A square's side, given as one number or as two equal ones."""
    value = given[name]
    if isinstance(value, list | tuple):
        if len(set(value)) != 1:
            raise UnsupportedCheckpoint(f"{name} {value!r} is not square")
        return _count({name: value[0]}, name)
    return _count(given, name)


def _one_of(given: dict[str, Any], name: str, default: str, known: tuple[str, ...]) -> str:
    value = given.get(name, default)
    if value not in known:
        raise UnsupportedCheckpoint(f"{name} {value!r} cannot be run; known: {', '.join(known)}")
    return value
