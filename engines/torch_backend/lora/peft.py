"""The weights of a LoRA adapter: pairs of matrices by module.

Source: Hu et al. 2021 (LoRA); Kalajdzievski 2023 (rsLoRA); peft's `LoraConfig`.

Shape letters: K inputs, N outputs, r rank.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from engines.base import AdapterLimits, BadAdapter, UnsupportedCheckpoint
from engines.packages.adapter_files import CONFIG_FILE, MAX_ALPHA, WEIGHTS_FILE, read_adapter
from engines.packages.checkpoint_json import Fields, shown

_WEIGHT = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class LowRank:
    """The delta of a linear layer: up @ down. Shapes: down (r, K), up float32 (N, r), scaled."""

    down: Tensor
    up: Tensor


def read_peft(directory: Path, limits: AdapterLimits) -> tuple[str, dict[str, LowRank]]:
    """The digest of an adapter's directory, and its deltas by transformers' modules. Raises: BadAdapter."""
    files = read_adapter(directory, limits)
    try:
        weights = safetensors.torch.load(files.weights)
        return files.digest, _pair(weights, files.config, limits)
    except UnsupportedCheckpoint as error:  # names the field
        raise BadAdapter(str(error)) from None
    except (SafetensorError, KeyError, ValueError) as error:
        raise BadAdapter(f"{WEIGHTS_FILE} is damaged: {error}") from None


def _pair(weights: dict[str, Tensor], config: Fields, limits: AdapterLimits) -> dict[str, LowRank]:
    """Raises: BadAdapter for tensors that are not pairs of matrices."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        found = _WEIGHT.fullmatch(name)
        if found is None:
            raise BadAdapter(
                f"the weight {shown(name)} is neither lora_A nor lora_B of a linear layer"
            )
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise BadAdapter(f"the weight {shown(name)} is not a matrix of numbers")
        parts.setdefault(found["module"], {})[found["part"]] = tensor
    if not parts:
        raise BadAdapter(f"{WEIGHTS_FILE} holds no weights")
    changes = {}
    for module, pair in parts.items():
        if len(pair) < 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            raise BadAdapter(f"{shown(module)} does not have lora_A and lora_B of the same rank")
        rank = pair["A"].shape[0]
        expected = _pattern(config, "rank_pattern", module) or config.get("r", rank)
        if rank != expected or rank > limits.max_rank:
            raise BadAdapter(
                f"{shown(module)} has rank {rank}, but {CONFIG_FILE} has {shown(expected)}, and the "
                f"maximum is {limits.max_rank} (VLM_LIMITS__MAX_LORA_RANK)"
            )
        alpha = _pattern(config, "alpha_pattern", module) or config.get("lora_alpha", 8)
        alpha = config.check_number("lora_alpha", alpha, 0, MAX_ALPHA)
        divisor = math.sqrt(rank) if config.flag("use_rslora", False) else rank
        changes[module] = LowRank(pair["A"], pair["B"].float() * (alpha / divisor))
    return changes


def _pattern(config: Fields, name: str, module: str) -> object:
    """The value of a module, if it has its own: keys are suffixes of names, or patterns, as in peft."""
    for key, value in config.section(name).values.items():
        try:
            is_meant = re.fullmatch(rf"(.*\.)?({key})", module)
        except re.error:
            raise config.refuse(name, f"has the key {shown(key)}, which is not a pattern") from None
        if is_meant:
            return value
    return None
