"""A checkpoint's `config.json`, as Hugging Face's LlavaForConditionalGeneration writes it, made a `VLMConfig`.

What it leaves out takes the values of transformers' own configurations. Each field is checked before anything is
built from it, and only checked ones reach transformers. Knows no tensors.
"""

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from engines.packages.checkpoint_json import Fields, read_json, shown
from engines.torch_backend.models.config import (
    RopeScaling,
    TextConfig,
    UnsupportedCheckpoint,
    VisionConfig,
    VLMConfig,
)

#: who wrote a `quantization_config`
QUANT_METHOD = "vlm-fleet"
MAX_VOCAB_SIZE = 2**21
MAX_IMAGE_SIZE = 2048
_SCHEMES = ("int8", "int4")
_TEXT_KINDS = ("llama", "mistral", "qwen2")
#: Several times what the largest published models have.
_MAX_COUNTS = {
    "hidden_size": 2**16,
    "intermediate_size": 2**20,
    "num_hidden_layers": 512,
    "num_attention_heads": 1024,
}
_MAX_TEXT_COUNTS = _MAX_COUNTS | {
    "vocab_size": MAX_VOCAB_SIZE,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "max_position_embeddings": 2**24,
}
_MAX_THETA = 1e12


def read_config(directory: Path) -> VLMConfig:
    """The configuration of a checkpoint. Raises: UnsupportedCheckpoint."""
    file = directory / "config.json"
    if not file.is_file():
        raise UnsupportedCheckpoint("the checkpoint has no config.json")
    return vlm_config_from_hf(read_json(file).values)


def vlm_config_from_hf(content: Any) -> VLMConfig:
    """Read the content of a `config.json`; absent fields take the values that transformers gives them.

    Raises: UnsupportedCheckpoint, naming what this backend cannot run.
    """
    config = Fields("config.json", content)
    _check_architecture(config)
    usual = CONFIG_MAPPING["llava"]()
    text = _text_config(config.section("text_config"), bool(config.flag("tie_word_embeddings")))
    vision = _vision_config(config, usual.vision_config)
    return VLMConfig(
        vision=vision,
        text=text,
        image_token_id=_image_token_id(config, text.vocab_size, usual.image_token_index),
        vision_feature_layers=_feature_layers(
            config, vision.num_layers, usual.vision_feature_layer
        ),
        vision_feature_select_strategy=config.one_of(
            "vision_feature_select_strategy",
            ("default", "full"),
            usual.vision_feature_select_strategy,
        ),
        projector_hidden_act=config.one_of(
            "projector_hidden_act",
            ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu"),
            usual.projector_hidden_act,
        ),
        projector_bias=config.flag("multimodal_projector_bias", usual.multimodal_projector_bias),
        quantization=_stored_quantization(config),
    )


def _check_architecture(config: Fields) -> None:
    kind = config.get("model_type", "llava")
    architectures = config.get("architectures") or ["LlavaForConditionalGeneration"]
    is_llava = isinstance(architectures, list) and "LlavaForConditionalGeneration" in architectures
    if kind != "llava" or not is_llava:
        raise config.refuse(
            "model_type",
            f"is {shown(kind)} (architectures: {shown(architectures)}); only LlavaForConditionalGeneration "
            "can be run, such as the checkpoints of llava-hf",
        )


def _stored_quantization(config: Fields) -> str | None:
    """The scheme in which `vlm quantize` saved the weights; nobody else's can be read."""
    given = config.section("quantization_config")
    if not given.values:
        return None
    scheme = given.get("scheme")
    if scheme not in _SCHEMES or given.get("quant_method") != QUANT_METHOD:
        raise config.refuse(
            "quantization_config",
            "says that the checkpoint is already quantized, and not by `vlm quantize`; take the "
            "full-precision one and ask for --quantization int8 or int4",
        )
    return scheme


def _complete(kind: str, section: Fields, given: dict[str, Any]) -> Any:
    """Transformers' configuration of a kind with the checked values that are given."""
    try:
        return CONFIG_MAPPING[kind](**{k: v for k, v in given.items() if v is not None})
    except Exception as error:  # whatever it makes of values that do not fit each other
        reason = " ".join(str(error).split()).rpartition("Error: ")[2][:200]
        raise UnsupportedCheckpoint(f"{section.file}: {section.path[:-1]}: {reason}") from None


def _vision_config(config: Fields, usual: Any) -> VisionConfig:
    section = config.section("vision_config")
    kind = section.get("model_type", "clip_vision_model")
    if kind != "clip_vision_model":
        raise section.refuse("model_type", f"is {shown(kind)}; only CLIP's tower can be run")
    if section.whole("num_channels", 3, at_most=2**10) != 3:
        raise section.refuse("num_channels", "is not 3; the tower has to take RGB images")
    given = {name: section.whole(name, at_most=most) for name, most in _MAX_COUNTS.items()}
    given |= {name: _side(section, name) for name in ("image_size", "patch_size")}
    given["hidden_act"] = section.one_of("hidden_act", ("quick_gelu", "gelu"))
    given["layer_norm_eps"] = section.number("layer_norm_eps", above=0, at_most=1)
    is_given = config.get("vision_config") is not None
    full = _complete("clip_vision_model", section, given) if is_given else usual
    if full.hidden_size % full.num_attention_heads:
        raise section.refuse("hidden_size", "is not a multiple of num_attention_heads")
    if full.patch_size > full.image_size:
        raise section.refuse("patch_size", f"is larger than image_size, which is {full.image_size}")
    return VisionConfig(
        hidden_size=full.hidden_size,
        intermediate_size=full.intermediate_size,
        num_layers=full.num_hidden_layers,
        num_heads=full.num_attention_heads,
        image_size=full.image_size,
        patch_size=full.patch_size,
        hidden_act=full.hidden_act,
        layer_norm_eps=full.layer_norm_eps,
    )


def _text_config(section: Fields, tied: bool) -> TextConfig:
    kind = section.get("model_type", "llama")
    if kind not in _TEXT_KINDS:
        families = ", ".join(_TEXT_KINDS)
        raise section.refuse(
            "model_type", f"is {shown(kind)}; these text models can be run: {families}"
        )
    given = {name: section.whole(name, at_most=most) for name, most in _MAX_TEXT_COUNTS.items()}
    names = ["attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"]
    given |= {name: section.flag(name) for name in names}
    given["rms_norm_eps"] = section.number("rms_norm_eps", above=0, at_most=1)
    given["sliding_window"] = section.whole("sliding_window", at_most=2**31)
    section.one_of("hidden_act", ("silu",))
    full = _complete(kind, section, given)
    num_heads, num_kv_heads = full.num_attention_heads, full.num_key_value_heads
    if num_heads % num_kv_heads:
        raise section.refuse(
            "num_key_value_heads",
            f"is {num_kv_heads}, no divisor of num_attention_heads, which is {num_heads}",
        )
    if not given["head_dim"] and full.hidden_size % num_heads:
        raise section.refuse("hidden_size", f"is no multiple of {num_heads} num_attention_heads")
    bias = kind == "qwen2" or (kind == "llama" and full.attention_bias)
    return TextConfig(
        vocab_size=full.vocab_size,
        hidden_size=full.hidden_size,
        intermediate_size=full.intermediate_size,
        num_layers=full.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=given["head_dim"] or full.hidden_size // num_heads,
        max_position_embeddings=_max_positions(section, full),
        rms_norm_eps=full.rms_norm_eps,
        rope_theta=_rope_theta(section, full),
        rope_scaling=_rope_scaling(section, full.max_position_embeddings),
        attention_bias=bias,
        attention_output_bias=bias and kind == "llama",
        mlp_bias=kind == "llama" and full.mlp_bias,
        tie_word_embeddings=tied or full.tie_word_embeddings,
    )


def _max_positions(section: Fields, full: Any) -> int:
    """The context length. A sliding window shortens it: within the window attention is exactly full."""
    window = getattr(full, "sliding_window", None)
    if "sliding_window" in section.values and section.get("sliding_window") is None:
        window = None  # said to have none, where the family's usual one has
    positions = full.max_position_embeddings
    return positions if window is None else min(positions, window)


def _rope_parameters(section: Fields) -> Fields:
    """The rotary settings: `rope_parameters` of transformers 5, `rope_scaling` before."""
    name = "rope_scaling" if section.get("rope_scaling") else "rope_parameters"
    parameters = section.section(name)
    if any(isinstance(value, dict) for value in parameters.values.values()):
        raise section.refuse(name, "differ between layers; one set can be run")
    if parameters.get("partial_rotary_factor", section.get("partial_rotary_factor", 1.0)) != 1.0:
        raise section.refuse("partial_rotary_factor", "is not 1; only that can be run")
    return parameters


def _rope_theta(section: Fields, full: Any) -> float:
    theta = _rope_parameters(section).number("rope_theta", above=0, at_most=_MAX_THETA)
    usual = full.rope_parameters["rope_theta"]
    return theta or section.number("rope_theta", usual, above=0, at_most=_MAX_THETA)


def _rope_scaling(section: Fields, max_positions: int) -> RopeScaling | None:
    parameters = _rope_parameters(section)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    names = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
    if kind not in ("linear", "llama3"):
        raise parameters.refuse(
            "rope_type", f"{shown(kind)} cannot be run; 'linear' and 'llama3' can"
        )
    factors = [parameters.number(name, above=0, at_most=1e6) for name in names[kind]]
    if None in factors:
        raise parameters.refuse("rope_type", f"{kind!r} lacks {names[kind][factors.index(None)]!r}")
    if kind == "linear":
        return RopeScaling("linear", factors[0])
    original = parameters.whole("original_max_position_embeddings", max_positions, at_most=2**24)
    factor, low, high = factors
    return RopeScaling("llama3", factor, low, high, original)


def _feature_layers(config: Fields, num_layers: int, usual: Any) -> tuple[int, ...]:
    given = config.get("vision_feature_layer", usual)
    layers = tuple(given) if isinstance(given, list | tuple) else (given,)
    # Hidden states are the embeddings and then every layer's output.
    in_range = (
        isinstance(i, int) and not isinstance(i, bool) and -num_layers - 1 <= i <= num_layers
        for i in layers
    )
    if not 1 <= len(layers) <= num_layers + 1 or not all(in_range):
        raise config.refuse(
            "vision_feature_layer",
            f"{shown(given)} does not name layers of a tower with {num_layers}",
        )
    return layers


def _image_token_id(config: Fields, vocab_size: int, usual: int) -> int:
    name = "image_token_id" if config.get("image_token_index") is None else "image_token_index"
    token_id = config.get(name, usual)
    if type(token_id) is not int or not 0 <= token_id < vocab_size:
        raise config.refuse(name, f"{shown(token_id)} lies outside the vocabulary of {vocab_size}")
    return token_id


def _side(section: Fields, name: str) -> int | None:
    """A square's side, given as one number or as two equal ones."""
    value = section.get(name)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise section.refuse(name, f"{shown(value)} is not square")
        section = Fields(section.file, {name: value[0]}, section.path)
    return section.whole(name, at_most=MAX_IMAGE_SIZE)
