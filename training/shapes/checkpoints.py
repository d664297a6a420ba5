"""Training checkpoints: tensors as safetensors, numbers as JSON, never pickle."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def save(folder: Path, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Write a checkpoint; one that is interrupted leaves the older one whole."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
        folder / "state.new",
    )
    (folder / "state.json.new").write_text(json.dumps(numbers, indent=2) + "\n")
    (folder / "state.new").rename(folder / "state.safetensors")
    (folder / "state.json.new").rename(folder / "state.json")


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save` wrote."""
    return load_file(folder / "state.safetensors"), json.loads((folder / "state.json").read_text())


def with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under names of a common beginning."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def of_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that `with_prefix` named so, under their own names."""
    return {
        name.removeprefix(f"{prefix}."): tensor
        for name, tensor in tensors.items()
        if name.startswith(f"{prefix}.")
    }
