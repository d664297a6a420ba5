"""Safetensors files to a model, tensor by tensor, so that memory peaks one tensor above the model itself.

Called by the loader. Weights are copied out of the mapped files: a file that is replaced under a running
worker changes nothing. Never pickle. Knows no requests and no engine.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engines.torch_backend.memory import free_bytes
from engines.torch_backend.models.config import UnsupportedCheckpoint, VLMConfig
from engines.torch_backend.models.llava import Llava, map_state_dict
from engines.torch_backend.quantization import Scheme

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_MAX_NAMES = 5  # in messages


class ModelTooLarge(Exception):
    """The weights do not fit the device's memory; the message has the numbers and what would fit."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a checkpoint keeps a weight."""

    name: str
    file: Path
    shape: tuple[int, ...]


def load_model(
    directory: Path,
    config: VLMConfig,
    device: torch.device,
    dtype: torch.dtype,
    scheme: Scheme | None = None,
    progress: Callable[[float], None] | None = None,
) -> Llava:
    """The model of a checkpoint, its decoder quantized on the way if asked.

    Raises: UnsupportedCheckpoint, ModelTooLarge.
    """
    stored = list_tensors(directory)
    check_memory(stored, device, dtype, scheme)
    with torch.device("meta"):
        model = Llava(config)
    if scheme is not None:
        scheme.swap_linears(model, dtype)
    read = _read_all(stored, device, dtype, scheme, progress or (lambda share: None))
    weights = map_state_dict(read, config)
    read.clear()
    _check_names(weights, dict(model.state_dict()))
    model.load_state_dict(weights, assign=True)
    if scheme is not None:
        scheme.prepare(model)
    return model.requires_grad_(False).eval()


def list_tensors(directory: Path) -> list[StoredTensor]:
    """What the safetensors files of a checkpoint hold, without reading weights.

    Raises: UnsupportedCheckpoint.
    """
    stored: list[StoredTensor] = []
    for file in _weight_files(directory):
        if not file.is_file():
            raise UnsupportedCheckpoint(f"{INDEX_FILE} names {file.name}, which is not there")
        try:
            with safe_open(file, "pt") as content:
                stored += (
                    StoredTensor(name, file, tuple(content.get_slice(name).get_shape()))
                    for name in content.keys()  # noqa: SIM118 - no mapping
                )
        except SafetensorError as error:
            raise UnsupportedCheckpoint(f"{file.name} is damaged: {error}") from None
    return stored


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        if any(Path(name).name != name for name in names):
            raise UnsupportedCheckpoint(f"{INDEX_FILE} names files outside the checkpoint")
        return [directory / name for name in sorted(set(names))]
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise UnsupportedCheckpoint(
            "the checkpoint has pickled weights only (.bin); unpickling can run any code, so only "
            "safetensors are read: save it again with transformers' save_pretrained"
        )
    raise UnsupportedCheckpoint(f"the checkpoint has no {SINGLE_FILE} and no {INDEX_FILE}")


def check_memory(
    stored: Iterable[StoredTensor], device: torch.device, dtype: torch.dtype, scheme: Scheme | None
) -> None:
    """Raises: ModelTooLarge, before anything is read."""
    needed = sum(_num_bytes(tensor, dtype, scheme) for tensor in stored)
    available = free_bytes(device)
    if needed > available:
        kind = f"{str(dtype).removeprefix('torch.')}{f' and {scheme.name}' if scheme else ''}"
        raise ModelTooLarge(
            f"the weights need {needed / 2**30:.1f} GiB in {kind}, but {device} has "
            f"{available / 2**30:.1f} GiB available; try bfloat16, --quantization int8 or int4, "
            "or a smaller model"
        )


def _num_bytes(tensor: StoredTensor, dtype: torch.dtype, scheme: Scheme | None) -> int:
    if scheme is not None and scheme.applies_to(tensor.name, tensor.shape):
        return scheme.num_bytes(tensor.shape, dtype)
    return math.prod(tensor.shape) * dtype.itemsize


def _read_all(
    stored: list[StoredTensor],
    device: torch.device,
    dtype: torch.dtype,
    scheme: Scheme | None,
    progress: Callable[[float], None],
) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    total = sum(math.prod(tensor.shape) for tensor in stored)
    done = 0
    for tensor in stored:
        # A fresh mapping for each, so that the pages of the last one are let go.
        with safe_open(tensor.file, "pt") as content:
            value: Tensor = content.get_tensor(tensor.name)
        if not value.is_floating_point():
            weights[tensor.name] = value.to(device, copy=True)
        elif scheme is not None and scheme.applies_to(tensor.name, tensor.shape):
            quantized = scheme.quantize_state_dict({tensor.name: value.to(device)}, dtype)
            weights |= quantized
        else:
            weights[tensor.name] = value.to(device, dtype, copy=True)
        done += math.prod(tensor.shape)
        progress(done / total)
    return weights


def _check_names(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    missing = sorted(expected.keys() - weights.keys())
    unexpected = sorted(weights.keys() - expected.keys())
    for problem, names in (("lacks", missing), ("has unknown", unexpected)):
        if names:
            shown = ", ".join(names[:_MAX_NAMES])
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            raise UnsupportedCheckpoint(f"the checkpoint {problem} weights: {shown}{more}")
    for name, value in weights.items():
        if value.shape != expected[name].shape:
            raise UnsupportedCheckpoint(
                f"the weight {name} is {tuple(value.shape)} but config.json makes it "
                f"{tuple(expected[name].shape)}"
            )
