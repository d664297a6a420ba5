"""Reads a checkpoint's `config.json` with transformers' classes, without unsafe fields.

No code of a checkpoint is run, nothing is fetched, and sizes are checked before anything is built.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from engines.packages.checkpoint_json import Fields, read_json, shown
from engines.text.tokenizer import MAX_VOCAB_SIZE
from engines.torch_backend.models.config import (
    MAX_IMAGE_SIZE,
    BeyondOurProgram,
    RopeScaling,
    TextConfig,
    UnsupportedCheckpoint,
    VisionConfig,
)

DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.bfloat16, torch.float16)}
_TEXT_KINDS = ("llama", "mistral", "qwen2")
#: Maximum values of integer fields in any section, several times the largest published ones.
MAX_WHOLE = {
    "hidden_size": 2**16,
    "intermediate_size": 2**20,
    "num_hidden_layers": 512,
    "num_attention_heads": 1024,
    "vocab_size": MAX_VOCAB_SIZE,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "max_position_embeddings": 2**24,
    "sliding_window": 2**31,
    "num_channels": 2**10,
}
#: Fields that would make transformers fetch kernels, files or code, or change how it loads models.
_NEVER_READ = frozenset({
    "auto_map", "attn_implementation", "experts_implementation", "transformers_weights", "fusion_config", "kernel_config",
    "distributed_config", "custom_pipelines", "dtype", "torch_dtype", "torchscript", "output_attentions",
    "output_hidden_states", "return_dict", "name_or_path", "use_cache", "gradient_checkpointing", "quantization_config",
})  # fmt: skip
#: Fields that name a timm model. A prefix that ends with a colon, such as `hf-hub:`, is its source.
_TIMM_NAMES = frozenset({"architecture", "backbone"})
_FLOAT = "__float__"
_MAX_THETA = 1e12
_FACTORS = ("factor", "low_freq_factor", "high_freq_factor")  #: fields of scaled rotary embeddings


def read_fields(directory: Path) -> Fields:
    """The fields of a checkpoint's `config.json`. Raises: UnsupportedCheckpoint."""
    file = directory / "config.json"
    if not file.is_file():
        raise UnsupportedCheckpoint(
            f"{directory} has no config.json: pass the directory of a transformers checkpoint"
        )
    return read_json(file)


def build_config(section: Fields, default_kind: str = "") -> Any:
    """Transformers' configuration of a section, without unsafe fields. Raises: UnsupportedCheckpoint."""
    kind = section.get("model_type", default_kind)
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise section.refuse("model_type", f"{shown(kind)} is unknown to transformers")
    believed = _safe_fields(section)
    try:
        return CONFIG_MAPPING[kind](**believed)
    except Exception as error:  # inconsistent values raise any type
        reason = " ".join(str(error).split()).rpartition("Error: ")[2][:200]
        raise UnsupportedCheckpoint(f"{section.file}: {reason}") from None


def _safe_fields(section: Fields) -> dict[str, Any]:
    """The safe fields of a section and its subsections. Raises: UnsupportedCheckpoint."""
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
                name, f"is {shown(value)}; name a timm model without a prefix like hf-hub:"
            )
        if name == "model_args" and not _are_sizes(value):
            raise section.refuse(name, f"is {shown(value)}, not an object of numbers")
        is_section = isinstance(value, Mapping) and value.keys() != {_FLOAT}
        values[name] = _safe_fields(section.section(name)) if is_section else _number(value)
    return values


def _are_sizes(value: Any) -> bool:
    """Whether timm's arguments are numbers. Strings can name files, or sources to fetch."""
    given = {} if value is None else value
    return isinstance(given, Mapping) and all(isinstance(x, int | float) for x in given.values())


def _number(value: Any) -> Any:
    """Convert infinite values from the form in which transformers writes them to JSON."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    if isinstance(value, Mapping) and value.keys() == {_FLOAT}:
        return {"Infinity": math.inf, "-Infinity": -math.inf}.get(str(value[_FLOAT]), math.nan)
    return value


def _check_numbers(section: Fields, epsilon: str) -> None:
    """Check the fields that determine memory, and the epsilon of the norms. Raises: UnsupportedCheckpoint."""
    for name, most in MAX_WHOLE.items():
        section.whole(name, at_most=most)
    section.number(epsilon, above=0, at_most=1)


def stored_dtype(config: Fields) -> torch.dtype:
    """The dtype of a checkpoint's weights before quantization; bfloat16 if it is not given."""
    for section in (config, config.section("text_config")):
        name = section.get("dtype", section.get("torch_dtype"))
        if isinstance(name, str) and name in DTYPES:
            return DTYPES[name]
    return torch.bfloat16


def check_clip(section: Fields) -> None:
    """Refuse vision towers other than CLIP's. Raises: UnsupportedCheckpoint."""
    kind = section.get("model_type", "clip_vision_model")
    if kind != "clip_vision_model":
        reason = f"is {shown(kind)}; only CLIP's tower is supported"
        raise BeyondOurProgram(section.refuse("model_type", reason))
    if section.get("num_channels", 3) != 3:
        raise section.refuse("num_channels", "is not 3; only RGB images are supported")
    section.one_of("hidden_act", ("quick_gelu", "gelu"))
    _check_numbers(section, "layer_norm_eps")


def clip_config(section: Fields, full: Any) -> VisionConfig:
    if full.hidden_size % full.num_attention_heads:
        raise section.refuse("hidden_size", "is not a multiple of num_attention_heads")
    image_size = _side(section, "image_size", full.image_size)
    patch_size = _side(section, "patch_size", full.patch_size)
    if patch_size > image_size:
        raise section.refuse("patch_size", f"is larger than image_size, which is {image_size}")
    return VisionConfig(
        hidden_size=full.hidden_size,
        intermediate_size=full.intermediate_size,
        num_layers=full.num_hidden_layers,
        num_heads=full.num_attention_heads,
        image_size=image_size,
        patch_size=patch_size,
        hidden_act=full.hidden_act,
        layer_norm_eps=full.layer_norm_eps,
    )


def check_llama(section: Fields) -> None:
    """Refuse decoders outside the LLaMA family. Raises: UnsupportedCheckpoint."""
    kind = section.get("model_type", "llama")
    if kind not in _TEXT_KINDS:
        reason = f"is {shown(kind)}; supported text models: {', '.join(_TEXT_KINDS)}"
        raise BeyondOurProgram(section.refuse("model_type", reason))
    activation = section.get("hidden_act", "silu")
    if activation != "silu":
        raise BeyondOurProgram(section.refuse("hidden_act", f"{shown(activation)} is not 'silu'"))
    _check_numbers(section, "rms_norm_eps")


def llama_config(section: Fields, full: Any, tied: bool = False) -> TextConfig:
    kind = full.model_type
    num_heads, num_kv_heads = full.num_attention_heads, full.num_key_value_heads
    if num_heads % num_kv_heads:
        raise section.refuse(
            "num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} heads"
        )
    head_dim = section.get("head_dim")
    if not head_dim and full.hidden_size % num_heads:
        raise section.refuse("hidden_size", f"is not a multiple of {num_heads} num_attention_heads")
    positions = full.max_position_embeddings
    theta, scaling = _read_rope(section, full)
    bias = kind == "qwen2" or (kind == "llama" and full.attention_bias)
    return TextConfig(
        vocab_size=full.vocab_size,
        hidden_size=full.hidden_size,
        intermediate_size=full.intermediate_size,
        num_layers=full.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim or full.hidden_size // num_heads,
        # up to the length of a sliding window, attention is full
        max_position_embeddings=min(positions, getattr(full, "sliding_window", None) or positions),
        rms_norm_eps=full.rms_norm_eps,
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=bias,
        attention_output_bias=bias and kind == "llama",
        mlp_bias=kind == "llama" and full.mlp_bias,
        tie_word_embeddings=tied or full.tie_word_embeddings,
    )


def _read_rope(section: Fields, full: Any) -> tuple[float, RopeScaling | None]:
    """The base of the rotary frequencies, and their scaling. Raises: UnsupportedCheckpoint."""
    rope = Fields(section.file, full.rope_parameters, f"{section.path}rope_parameters.")
    kind = rope.get("rope_type")
    if not isinstance(kind, str):
        raise rope.refuse("rope_type", f"is {shown(kind)}, not a string")
    are_alike = not any(isinstance(value, dict) for value in rope.values.values())
    if kind not in ("default", "linear", "llama3") or not are_alike:
        known = "supported are 'linear' and 'llama3', for all layers"
        reason = f"{shown(kind)} is not supported; {known}"
        raise BeyondOurProgram(rope.refuse("rope_type", reason))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        reason = "is not 1, the only supported value"
        raise BeyondOurProgram(rope.refuse("partial_rotary_factor", reason))
    theta = rope.number("rope_theta", above=0, at_most=_MAX_THETA)
    names = {"default": (), "linear": _FACTORS[:1], "llama3": _FACTORS}[kind]
    factors = [rope.number(name, above=0, at_most=1e6) for name in names]
    if kind != "llama3":
        return theta, RopeScaling("linear", factors[0]) if factors else None
    usual = full.max_position_embeddings
    original = rope.whole("original_max_position_embeddings", usual, at_most=2**24)
    factor, low, high = factors
    return theta, RopeScaling("llama3", factor, low, high, original)


def _side(section: Fields, name: str, usual: int | None) -> int:
    """The side of a square, given as one number or as two equal numbers."""
    value = section.get(name, usual)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise section.refuse(name, f"{shown(value)} is not square")
        value = value[0]
    if value is None:
        raise section.refuse(name, "is null; it must be the side of an image in pixels")
    return Fields(section.file, {name: value}, section.path).whole(name, at_most=MAX_IMAGE_SIZE)
