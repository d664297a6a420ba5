"""Checks whether a model can run on this machine, from its small files and the size of its weights."""

from pathlib import Path

import torch

from engines.text.processor import create_processor
from engines.torch_backend.loading.weights import require_memory
from engines.torch_backend.models.registry import find_family

#: Lower bound of bytes in memory per stored byte of weights, by quantization.
_LEAST_RATIO = {"none": 1.0, "int8": 0.4, "int4": 0.2}


def check_model(
    directory: Path, num_weight_bytes: int, device: torch.device, quantization: str = "none"
) -> None:
    """Check a model before its weights are downloaded. Raises: UnsupportedCheckpoint, ModelTooLarge."""
    family, config = find_family(directory)
    multimodal = family.processor(directory, config)
    create_processor(directory, multimodal)
    check_memory(num_weight_bytes, device, quantization)


def check_memory(num_weight_bytes: int, device: torch.device, quantization: str = "none") -> None:
    """Raises: ModelTooLarge if even the lowest estimate does not fit. The loader checks the exact size later."""
    require_memory(num_weight_bytes * _LEAST_RATIO[quantization], device, "at least")
