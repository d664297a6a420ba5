"""Reads a checkpoint's `config.json`, completed by transformers' configuration classes.

Missing fields have transformers' defaults. Every field is checked before anything is built from it, and only known
fields reach transformers; no code of a checkpoint is run.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from engines.packages.checkpoint_json import Fields, read_json, shown
from engines.text.tokenizer import MAX_VOCAB_SIZE
from engines.torch_backend.models.config import (
    MAX_IMAGE_SIZE,
    BeyondOurProgram,
    RopeScaling,
    TextConfig,
    UnsupportedCheckpoint,
    VisionConfig,
    beyond_our_program,
)

_DTYPES = {str(t).removeprefix("torch."): t for t in (torch.float32, torch.bfloat16, torch.float16)}
_TEXT_KINDS = ("llama", "mistral", "qwen2")
#: Limits of integer fields, several times the largest published values, in any section.
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
_SIDES = ("image_size", "patch_size")
_EPSILONS = ("layer_norm_eps", "rms_norm_eps")
_FLAGS = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
#: Fields in which null differs from absence.
_NULLABLE = frozenset({"sliding_window", "num_key_value_heads", "head_dim"})
_MAX_THETA = 1e12


def read_fields(directory: Path) -> Fields:
    """The fields of a checkpoint's `config.json`. Raises: UnsupportedCheckpoint."""
    file = directory / "config.json"
    if not file.is_file():
        raise UnsupportedCheckpoint(
            f"{directory} has no config.json: pass the directory of a transformers checkpoint"
        )
    return read_json(file)


def complete(kind: Any, section: Fields) -> PreTrainedConfig:
    """Transformers' configuration of a model type, with defaults for missing fields.

    Raises: UnsupportedCheckpoint for an unknown model type, and for values out of bounds.
    """
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise section.refuse("model_type", f"{shown(kind)} is unknown to transformers")
    config_class = CONFIG_MAPPING[kind]
    inner: dict[str, Any] = dict(config_class.sub_configs)  # pyright: ignore
    known = config_class.__dataclass_fields__.keys() - (
        PreTrainedConfig.__dataclass_fields__.keys() | inner.keys() | {"rope_parameters"}
    )
    values = {**section.values, **_bounded(section)}
    given = {n: v for n, v in values.items() if n in known and (v is not None or n in _NULLABLE)}
    for alias, name in config_class.attribute_map.items():
        if name in known and name not in given and section.get(alias) is not None:
            given[name] = section.get(alias)
    usual = config_class() if inner else None
    for name in inner:
        if section.get(name) is not None:
            part = section.section(name)
            part_kind = part.get("model_type", getattr(usual, name).model_type)
            given[name] = complete(part_kind, part)
    try:
        return AutoConfig.for_model(kind, **given)
    except Exception as error:  # of any type, for inconsistent values
        where = f"{section.file}: {section.path[:-1]}".removesuffix(": ")
        reason = " ".join(str(error).split()).rpartition("Error: ")[2][:200]
        raise UnsupportedCheckpoint(f"{where}: {reason}") from None


def _bounded(section: Fields) -> dict[str, Any]:
    """The fields that determine memory, checked against their limits."""
    values = {name: section.whole(name, at_most=most) for name, most in MAX_WHOLE.items()}
    values |= {name: _side(section, name) for name in _SIDES}
    values |= {name: section.number(name, above=0, at_most=1) for name in _EPSILONS}
    values |= {name: section.flag(name) for name in _FLAGS}
    return {name: value for name, value in values.items() if value is not None}


def stored_dtype(config: Fields) -> torch.dtype:
    """The dtype of a checkpoint's weights, or the one before quantization."""
    for section in (config, config.section("text_config")):
        name = section.get("dtype", section.get("torch_dtype"))
        if isinstance(name, str) and name in _DTYPES:
            return _DTYPES[name]
    return torch.bfloat16


def check_clip(section: Fields) -> None:
    """Refuse vision towers other than CLIP's. Raises: UnsupportedCheckpoint."""
    kind = section.get("model_type", "clip_vision_model")
    if kind != "clip_vision_model":
        with beyond_our_program():
            raise section.refuse("model_type", f"is {shown(kind)}; only CLIP's tower is supported")
    if section.whole("num_channels", 3, at_most=MAX_WHOLE["num_channels"]) != 3:
        raise section.refuse("num_channels", "is not 3; the tower has to take RGB images")
    section.one_of("hidden_act", ("quick_gelu", "gelu"))


def clip_config(section: Fields, full: Any) -> VisionConfig:
    """The CLIP tower's configuration. Raises: UnsupportedCheckpoint."""
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


def check_llama(section: Fields) -> None:
    """Refuse decoders outside the LLaMA family. Raises: UnsupportedCheckpoint."""
    kind = section.get("model_type", "llama")
    if kind not in _TEXT_KINDS:
        families = ", ".join(_TEXT_KINDS)
        with beyond_our_program():
            raise section.refuse(
                "model_type", f"is {shown(kind)}; supported text models: {families}"
            )
    with beyond_our_program():
        section.one_of("hidden_act", ("silu",))
    _rope_scaling(section, 1)


def llama_config(section: Fields, full: Any, tied: bool = False) -> TextConfig:
    """The decoder's configuration. Raises: UnsupportedCheckpoint."""
    kind = full.model_type
    num_heads, num_kv_heads = full.num_attention_heads, full.num_key_value_heads
    if num_heads % num_kv_heads:
        raise section.refuse(
            "num_key_value_heads",
            f"is {num_kv_heads}, which does not divide num_attention_heads, {num_heads}",
        )
    head_dim = section.get("head_dim")
    if not head_dim and full.hidden_size % num_heads:
        raise section.refuse("hidden_size", f"is not a multiple of {num_heads} num_attention_heads")
    positions = full.max_position_embeddings
    theta = _rope_parameters(section).number("rope_theta", above=0, at_most=_MAX_THETA)
    usual = full.rope_parameters["rope_theta"]
    bias = kind == "qwen2" or (kind == "llama" and full.attention_bias)
    return TextConfig(
        vocab_size=full.vocab_size,
        hidden_size=full.hidden_size,
        intermediate_size=full.intermediate_size,
        num_layers=full.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim or full.hidden_size // num_heads,
        # within a sliding window, attention is full
        max_position_embeddings=min(positions, getattr(full, "sliding_window", None) or positions),
        rms_norm_eps=full.rms_norm_eps,
        rope_theta=theta or section.number("rope_theta", usual, above=0, at_most=_MAX_THETA),
        rope_scaling=_rope_scaling(section, positions),
        attention_bias=bias,
        attention_output_bias=bias and kind == "llama",
        mlp_bias=kind == "llama" and full.mlp_bias,
        tie_word_embeddings=tied or full.tie_word_embeddings,
    )


def _rope_parameters(section: Fields) -> Fields:
    """The RoPE settings: `rope_parameters` of transformers 5, `rope_scaling` of older files."""
    name = "rope_scaling" if section.get("rope_scaling") else "rope_parameters"
    parameters = section.section(name)
    if any(isinstance(value, dict) for value in parameters.values.values()):
        with beyond_our_program():
            raise section.refuse(name, "differ between layers, which is not supported")
    if parameters.get("partial_rotary_factor", section.get("partial_rotary_factor", 1.0)) != 1.0:
        with beyond_our_program():
            raise section.refuse("partial_rotary_factor", "is not 1, the only supported value")
    return parameters


def _rope_scaling(section: Fields, max_positions: int) -> RopeScaling | None:
    parameters = _rope_parameters(section)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return None
    names = {"linear": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
    if kind not in ("linear", "llama3"):
        refusal = parameters.refuse(
            "rope_type", f"{shown(kind)} is not supported; supported are 'linear' and 'llama3'"
        )
        raise BeyondOurProgram(str(refusal)) if isinstance(kind, str) else refusal
    factors = [parameters.number(name, above=0, at_most=1e6) for name in names[kind]]
    if None in factors:
        raise parameters.refuse("rope_type", f"{kind!r} lacks {names[kind][factors.index(None)]!r}")
    if kind == "linear":
        return RopeScaling("linear", factors[0])
    original = parameters.whole("original_max_position_embeddings", max_positions, at_most=2**24)
    factor, low, high = factors
    return RopeScaling("llama3", factor, low, high, original)


def _side(section: Fields, name: str) -> int | None:
    """The side of a square, given as one number or as two equal numbers."""
    value = section.get(name)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise section.refuse(name, f"{shown(value)} is not square")
        section = Fields(section.file, {name: value[0]}, section.path)
    return section.whole(name, at_most=MAX_IMAGE_SIZE)
