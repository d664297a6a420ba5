"""Whether a model can be run on this machine, seen from its small files and the size of its weights.

Called before weights are downloaded, and where models are listed.
"""

from pathlib import Path

import torch

from engines.text.processor import create_processor
from engines.torch_backend.loading.weights import ModelTooLarge
from engines.torch_backend.memory import free_bytes
from engines.torch_backend.models.registry import find_family

#: Least bytes of weights in memory for one that is stored, by what they become.
_LEAST_RATIO = {"none": 1.0, "int8": 0.4, "int4": 0.2}


def check_model(
    directory: Path,
    num_weight_bytes: int,
    device: torch.device,
    quantization: str = "none",
) -> None:
    """See that the torch engine has a program for a model, and the device memory for its weights.

    `num_weight_bytes` are those of their files. Raises: UnsupportedCheckpoint, ModelTooLarge.
    """
    family, config = find_family(directory)
    multimodal = family.processor(directory, config)
    create_processor(directory, multimodal, config.text.max_position_embeddings)
    check_memory(num_weight_bytes, device, quantization)


def check_memory(
    num_weight_bytes: int,
    device: torch.device,
    quantization: str = "none",
) -> None:
    """Raises: ModelTooLarge for what cannot fit, whatever the precision; the loader knows exactly."""
    least = num_weight_bytes * _LEAST_RATIO[quantization]
    available = free_bytes(device)
    if least > available:
        raise ModelTooLarge(
            f"the weights have {num_weight_bytes / 2**30:.1f} GiB and need at least "
            f"{least / 2**30:.1f} GiB of memory, but {device} has {available / 2**30:.1f} GiB "
            "available; try --quantization int4, a quantized or a smaller model"
        )
