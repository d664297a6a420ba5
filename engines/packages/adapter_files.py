"""Reads the untrusted files of a LoRA adapter: safetensors only, limited in size, without unknown fields.

Source: peft's `LoraConfig`.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from engines.base import AdapterLimits, BadAdapter, UnsupportedCheckpoint
from engines.packages.checkpoint_json import Fields, read_json, shown

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_ALPHA = 1e6
#: Fields without effect on the computation, or checked below. All others must be unset (null, false, 0, empty).
_KNOWN = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type",
    "use_rslora",
})  # fmt: skip
#: Values of `init_lora_weights` that leave the base model unchanged. Others (PiSSA, OLoRA, CorDA, LoftQ) change it.
_INITS = ("gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    config: Fields
    weights: bytes
    digest: str


def read_adapter(directory: Path, limits: AdapterLimits) -> AdapterFiles:
    try:
        return _read(directory, limits)
    except UnsupportedCheckpoint as error:  # an invalid field
        raise BadAdapter(str(error)) from None
    except OSError as error:
        raise BadAdapter(f"the adapter cannot be read ({error.strerror})") from None


def _read(directory: Path, limits: AdapterLimits) -> AdapterFiles:
    config_file, weights_file = directory / CONFIG_FILE, directory / WEIGHTS_FILE
    if not config_file.is_file():
        raise BadAdapter(f"there is no {CONFIG_FILE}: give a directory that peft has saved")
    if not weights_file.is_file():
        has_pickle = any(directory.glob("*.bin")) or any(directory.glob("*.pt*"))
        why = "; pickled weights (.bin) are not read, because unpickling can run any code"
        raise BadAdapter(
            f"there is no {WEIGHTS_FILE}{why if has_pickle else ''}: save the adapter with safe_serialization=True"
        )
    num_bytes = sum(file.stat().st_size for file in (config_file, weights_file))
    if num_bytes > limits.max_bytes:
        raise BadAdapter(
            f"the adapter has {num_bytes} bytes, but the limit is {limits.max_bytes} "
            "(VLM_LIMITS__MAX_LORA_BYTES)"
        )
    config = read_json(config_file)
    _check(config, limits)
    content = weights_file.read_bytes()  # read once: the digest is that of the loaded weights
    digest = hashlib.sha256(config_file.read_bytes() + content).hexdigest()[:32]
    return AdapterFiles(config, content, digest)


def _check(config: Fields, limits: AdapterLimits) -> None:
    """Raises: BadAdapter, UnsupportedCheckpoint, for anything but plain LoRA."""
    config.one_of("peft_type", ("LORA",), "missing")
    config.whole("r", at_most=limits.max_rank)
    config.number("lora_alpha", above=0, at_most=MAX_ALPHA)
    config.flag("use_rslora")
    if config.get("use_dora"):
        raise config.refuse("use_dora", "is true: DoRA is not supported; merge the adapter")
    if config.get("modules_to_save"):
        names = shown(config.get("modules_to_save"))
        raise config.refuse("modules_to_save", f"is {names}: unsupported; merge the adapter")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise config.refuse("bias", "is trained: biases are not supported; train with bias='none'")
    init = config.get("init_lora_weights", True)
    if not isinstance(init, bool) and init not in _INITS:
        raise config.refuse(
            "init_lora_weights",
            f"is {shown(init)}, which changes the base model: save it converted "
            "(path_initial_model_for_weight_conversion), or merge the adapter",
        )
    for name, value in config.values.items():
        if name not in _KNOWN and name != "bias" and value not in (None, False, {}, [], "", 0):
            raise config.refuse(
                name, f"is {shown(value)}: this is not supported; merge the adapter"
            )
