"""Finds the engine of a model. Imports torch."""

from pathlib import Path

import torch

from engines.base import UnsupportedCheckpoint
from engines.pooling.load import find_kind
from engines.torch_backend.loading.check import check_memory, check_model


def find_engine(directory: Path, num_weight_bytes: int) -> str:
    """The engine that runs a model on this machine, at its lowest precision.

    Raises: UnsupportedCheckpoint, ModelTooLarge.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        check_model(directory, num_weight_bytes, device, "int4")
    except UnsupportedCheckpoint as problem:
        try:
            find_kind(directory)
        except UnsupportedCheckpoint:
            raise problem from None
        check_memory(num_weight_bytes, device)
        return "pooling"
    return "torch"
