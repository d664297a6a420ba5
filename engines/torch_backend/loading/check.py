"""Checks whether a model can run on this machine, from its small files and the size of its weights.

Called before a download, and when models are listed.
"""

from pathlib import Path

import torch

from engines.text.processor import create_processor
from engines.torch_backend.loading.weights import ModelTooLarge
from engines.torch_backend.memory import free_bytes
from engines.torch_backend.models.registry import find_family

#: Least bytes in memory per stored byte of weights, by quantization.
_LEAST_RATIO = {"none": 1.0, "int8": 0.4, "int4": 0.2}


def check_model(
    directory: Path, num_weight_bytes: int, device: torch.device, quantization: str = "none"
) -> None:
    """Check that the torch engine supports a model and that the device has memory for its weights.

    `num_weight_bytes`: of the files. Raises: UnsupportedCheckpoint, ModelTooLarge.
    """
    family, config = find_family(directory)
    multimodal = family.processor(directory, config)
    create_processor(directory, multimodal)
    check_memory(num_weight_bytes, device, quantization)


def check_memory(num_weight_bytes: int, device: torch.device, quantization: str = "none") -> None:
    """Raises: ModelTooLarge for weights that cannot fit in any precision; the loader checks exactly."""
    least = num_weight_bytes * _LEAST_RATIO[quantization]
    available = free_bytes(device)
    if least > available:
        raise ModelTooLarge(
            f"the weights have {num_weight_bytes / 2**30:.1f} GiB and need at least "
            f"{least / 2**30:.1f} GiB of memory, but {device} has {available / 2**30:.1f} GiB "
            "available; try --quantization int4, a quantized or a smaller model"
        )
