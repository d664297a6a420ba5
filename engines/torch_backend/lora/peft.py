"""An adapter's directory, as `peft` writes it, read without trust: safetensors alone, bounded, every field known.

Source: Hu et al. 2021 (LoRA); Kalajdzievski 2023 (rsLoRA); peft's `LoraConfig`.

Shape letters: K inputs, N outputs, r rank.
"""

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from engines.base import AdapterLimits, BadAdapter, UnsupportedCheckpoint
from engines.packages.checkpoint_json import Fields, read_json, shown

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_MAX_ALPHA = 1e6
_MAX_NAMES = 3  # in messages
#: Fields that change no arithmetic, and those that are looked at below. Any other must say nothing.
_KNOWN = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "eva_config", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "target_modules", "task_type",
    "use_rslora",
})  # fmt: skip
#: Beginnings that leave the base model's own weights as they are. Others (PiSSA, OLoRA, CorDA, LoftQ) change them.
_INITS = ("gaussian", "eva", "orthogonal")
_WEIGHT = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a map: `scale` * up @ down. Shapes: down (r, K), up (N, r)."""

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class PeftFiles:
    """An adapter as it is stored. `changes` are by the names of transformers' modules."""

    digest: str
    changes: dict[str, LowRank]


def read_peft(directory: Path, limits: AdapterLimits) -> PeftFiles:
    """Read an adapter's directory. Raises: BadAdapter."""
    try:
        return _read(directory, limits)
    except UnsupportedCheckpoint as error:  # of a field
        raise BadAdapter(str(error)) from None
    except OSError as error:
        raise BadAdapter(f"the adapter cannot be read ({error.strerror})") from None


def _read(directory: Path, limits: AdapterLimits) -> PeftFiles:
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
            f"the adapter has {num_bytes} bytes, and at most {limits.max_bytes} are taken "
            "(VLM_LIMITS__MAX_LORA_BYTES)"
        )
    config = read_json(config_file)
    _check(config, limits)
    content = (
        weights_file.read_bytes()
    )  # what is digested is what is used, whoever writes meanwhile
    digest = hashlib.sha256(config_file.read_bytes() + content).hexdigest()[:32]
    try:
        weights = safetensors.torch.load(content)
    except (SafetensorError, KeyError, ValueError) as error:
        raise BadAdapter(f"{WEIGHTS_FILE} is damaged: {error}") from None
    return PeftFiles(digest, _pair(weights, config, limits))


def _check(config: Fields, limits: AdapterLimits) -> None:
    """Raises: BadAdapter, UnsupportedCheckpoint, for what is not plain LoRA."""
    config.one_of("peft_type", ("LORA",), "missing")
    config.whole("r", at_most=limits.max_rank)
    config.number("lora_alpha", above=0, at_most=_MAX_ALPHA)
    config.flag("use_rslora")
    if config.get("use_dora"):
        raise config.refuse("use_dora", "is true: DoRA is not supported; merge the adapter")
    if config.get("modules_to_save"):
        names = shown(config.get("modules_to_save"))
        raise config.refuse("modules_to_save", f"is {names}: whole modules are not adapters; merge")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise config.refuse("bias", "is trained: biases are not supported; train with bias='none'")
    init = config.get("init_lora_weights", True)
    if not isinstance(init, bool) and init not in _INITS:
        raise config.refuse(
            "init_lora_weights",
            f"is {shown(init)}, which changes the base model: save it converted "
            "(path_initial_model_for_weight_conversion), or merge it",
        )
    for name, value in config.values.items():
        if name not in _KNOWN and name != "bias" and value not in (None, False, {}, [], "", 0):
            raise config.refuse(
                name, f"is {shown(value)}: this is not supported; merge the adapter"
            )


def _pair(weights: dict[str, Tensor], config: Fields, limits: AdapterLimits) -> dict[str, LowRank]:
    """Raises: BadAdapter for what is no pair of matrices."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        found = _WEIGHT.fullmatch(name)
        if found is None:
            raise BadAdapter(
                f"the weight {shown(name)} is none of a linear map's lora_A and lora_B"
            )
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise BadAdapter(f"the weight {shown(name)} is no matrix of numbers")
        parts.setdefault(found["module"], {})[found["part"]] = tensor
    if not parts:
        raise BadAdapter(f"{WEIGHTS_FILE} holds no weights")
    changes = {}
    for module, pair in parts.items():
        if len(pair) < 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            raise BadAdapter(f"{shown(module)} has not both of lora_A and lora_B, of one rank")
        rank = pair["A"].shape[0]
        expected = _pattern(config, "rank_pattern", module) or config.get("r", rank)
        if rank != expected or rank > limits.max_rank:
            raise BadAdapter(
                f"{shown(module)} has rank {rank}, and {CONFIG_FILE} says {shown(expected)}; at most "
                f"{limits.max_rank} is taken (VLM_LIMITS__MAX_LORA_RANK)"
            )
        alpha = _pattern(config, "alpha_pattern", module) or config.get("lora_alpha", 8)
        alpha = config.check_number("lora_alpha", alpha, 0, _MAX_ALPHA)
        divisor = math.sqrt(rank) if config.flag("use_rslora", False) else rank
        changes[module] = LowRank(pair["A"], pair["B"], alpha / divisor)
    return changes


def _pattern(config: Fields, name: str, module: str) -> object:
    """A module's own value, if it has one: keys are the ends of names, or patterns of them, as in peft."""
    for key, value in config.section(name).values.items():
        try:
            is_meant = re.fullmatch(rf"(.*\.)?({key})", module)
        except re.error:
            raise config.refuse(name, f"has the key {shown(key)}, which is no pattern") from None
        if is_meant:
            return value
    return None


def name_some(names: list[str]) -> str:
    """A few names, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
