"""Random LoRA adapters as `peft` writes them, and the merged weights of a model of transformers."""

import json
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from engines.base import AdapterLimits

LIMITS = AdapterLimits(max_rank=16, max_bytes=2**20)


def linear_names(model: nn.Module, ends: Iterable[str], within: str = "") -> list[str]:
    """Returns the names of linear layers of a model that end with one of `ends`."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.endswith(tuple(ends)) and within in name
    ]


def make_changes(
    model: nn.Module, names: Iterable[str], rank: int = 4, seed: int = 1, std: float = 0.3
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns random A and B of some layers, by name."""
    generator = torch.Generator().manual_seed(seed)
    changes = {}
    for name in names:
        num_outputs, num_inputs = _weight(model, name).shape
        down = torch.randn(rank, num_inputs, generator=generator) / num_inputs**0.5
        changes[name] = down, std * torch.randn(num_outputs, rank, generator=generator)
    return changes


def write_adapter(
    directory: Path, changes: dict[str, tuple[Tensor, Tensor]], **config: Any
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    rank = max((len(down) for down, _ in changes.values()), default=4)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none", **config}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    weights = {}
    for name, (down, up) in changes.items():
        weights[f"base_model.model.{name}.lora_A.weight"] = down.contiguous()
        weights[f"base_model.model.{name}.lora_B.weight"] = up.contiguous()
    save_file(weights, directory / "adapter_model.safetensors")
    return directory


def merged(
    model: nn.Module, changes: dict[str, tuple[Tensor, Tensor]], scale: float | None = None
) -> Any:
    """Returns a copy of the model whose weights are W + scale B A; `scale` None: 8 / rank."""
    copy = deepcopy(model)
    for name, (down, up) in changes.items():
        factor = 8 / len(down) if scale is None else scale
        _weight(copy, name).add_(factor * up @ down)
    return copy


def _weight(model: nn.Module, name: str) -> Tensor:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    return linear.weight.data
