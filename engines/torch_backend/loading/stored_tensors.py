"""Reads the safetensors files of a checkpoint, one tensor at a time. Pickled weights are refused."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engines.packages.checkpoint_json import read_json
from engines.torch_backend.models.config import UnsupportedCheckpoint

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
#: Readable types, as safetensors names them.
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A weight's location in a checkpoint, and its header. `kind` is its type in safetensors' notation."""

    name: str
    file: Path
    shape: tuple[int, ...]
    kind: str

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.kind]

    @property
    def num_stored_bytes(self) -> int:
        return self.num_values * self.dtype.itemsize

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes in memory after floating-point numbers are converted to `dtype`."""
        return self.num_values * (dtype if self.dtype.is_floating_point else self.dtype).itemsize

    def map(self) -> Tensor:
        """Map the tensor from the file. Raises: UnsupportedCheckpoint if it contains NaN or Inf."""
        # a separate mapping, so that dropping the tensor frees its pages
        with safe_open(self.file, "pt") as content:
            return finite(self.name, content.get_tensor(self.name))


def finite(name: str, weight: Tensor) -> Tensor:
    """Return the weight unchanged. Raises: UnsupportedCheckpoint if it contains NaN or Inf."""
    is_float = weight.is_floating_point() and weight.dtype.itemsize > 1  # FP8 is checked as float32
    if is_float and weight.numel():
        # a single pass, much faster than `isfinite`; NaN propagates
        least, most = torch.aminmax(weight)
        if not (least.isfinite() and most.isfinite()):
            raise UnsupportedCheckpoint(
                f"the weight {name} has values that are not finite (NaN or Inf); download the "
                "checkpoint again, or use another checkpoint"
            )
    return weight


def list_tensors(directory: Path) -> list[StoredTensor]:
    """List the tensors in a checkpoint's safetensors files without reading weights. Raises: UnsupportedCheckpoint."""
    stored: list[StoredTensor] = []
    for file in _weight_files(directory):
        if not file.is_file():
            raise UnsupportedCheckpoint(f"{INDEX_FILE} names {file.name}, which does not exist")
        try:
            stored += _list_file(file)
        except SafetensorError as error:
            raise UnsupportedCheckpoint(f"{file.name} is damaged: {error}") from None
    return stored


def _list_file(file: Path) -> Iterator[StoredTensor]:
    with safe_open(file, "pt") as content:
        for name in content.keys():  # noqa: SIM118 - not a mapping
            part = content.get_slice(name)
            kind = part.get_dtype()
            if kind not in _DTYPES:
                known = ", ".join(sorted(_DTYPES))
                raise UnsupportedCheckpoint(
                    f"{file.name}: the weight {name} has type {kind}; supported types: {known}"
                )
            yield StoredTensor(name, file, tuple(part.get_shape()), kind)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if index.is_file():
        names = read_json(index).section("weight_map").values.values()
        if not all(isinstance(name, str) for name in names):
            raise UnsupportedCheckpoint(
                f"{INDEX_FILE}: weight_map has a value that is not a file name"
            )
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
