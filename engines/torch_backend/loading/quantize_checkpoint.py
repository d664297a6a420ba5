"""A checkpoint with its decoder quantized, saved beside the original as compressed-tensors: what `vlm quantize` does.

One tensor after another is read, rounded and written, so that memory stays at one file of the copy.
"""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TimeElapsedColumn
from torch import Tensor, nn

from engines.packages.resolve import ModelUnavailable, resolve_model
from engines.torch_backend.layers.linear import LinearWeights
from engines.torch_backend.layers.quantization import SCHEMES
from engines.torch_backend.layers.quantized_linear import (
    GROUP_SIZES,
    Int4Linear,
    QuantizedLinear,
)
from engines.torch_backend.loading.formats.compressed_tensors import to_config, to_parts
from engines.torch_backend.loading.formats.reader import Integers
from engines.torch_backend.loading.published import find_layer, find_published
from engines.torch_backend.loading.rounding import round_int4, round_int8
from engines.torch_backend.loading.stored_tensors import (
    INDEX_FILE,
    MAX_SHARD_BYTES,
    TensorWriter,
    list_tensors,
)
from engines.torch_backend.loading.weights import build_empty
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.registry import find_family

_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_HEAD = "re:.*lm_head"


def quantize_checkpoint(
    source: Path,
    target: Path,
    scheme: str,
    *,
    head: str = "none",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[float], None] | None = None,
) -> tuple[int, int]:
    """Write the quantized copy of a checkpoint; `progress` is told the share of numbers done, 0..1.

    `head` is "int8" for an output head in 8 bits, too. `config.json` comes last: what was interrupted is no
    checkpoint. Returns: bytes of the weights before and after.
    Raises: UnsupportedCheckpoint, FileExistsError, OSError.
    """
    family, config = find_family(source)
    rename = partial(family.rename, config=config)
    published, stored = find_published(source, list_tensors(source), torch.device("cpu"), rename)
    if config.quantization is not None or (published is not None and published.has_integers):
        raise UnsupportedCheckpoint("the checkpoint is already quantized; use the original")
    linears = [] if published is None else published.linears
    names = [tensor.name for tensor in stored] + [f"{linear.name}.weight" for linear in linears]
    model = build_empty(family, config, SCHEMES[scheme], torch.float32)
    layers = _Layers(model, rename, head, names)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty")
    writer = TensorWriter(target, max_shard_bytes)
    total = sum(item.num_values for item in (*stored, *linears))
    done = 0
    groups: dict[str, Integers] = {}  # an example of each

    def write(name: str, value: Tensor, dtype: torch.dtype) -> None:
        kind = layers.targets.get(name)
        if kind is None:
            writer.add(name, value if value.dtype == dtype else value.to(dtype))
            return
        if kind == _HEAD or scheme == "int8":
            integers = round_int8(value, dtype)
        else:
            integers = round_int4(value, dtype, layers.group_size)
        groups.setdefault(kind, integers)
        for part, tensor in to_parts(integers, dtype).items():
            writer.add(f"{name.removesuffix('.weight')}.{part}", tensor)

    for tensor in stored:
        value = tensor.map()
        write(tensor.name, value, value.dtype)
        done += tensor.num_values
        _tell(progress, done / total)
    for linear in linears:
        assert published is not None
        write(f"{linear.name}.weight", published.read_numbers(linear), published.dtype)
        done += linear.num_values
        _tell(progress, done / total)
    writer.close()
    _copy_text_files(source, target, to_config(groups, layers.ignored()))
    return _weight_bytes(source), _weight_bytes(target)


class _Layers:
    """Which stored weights are quantized, by the layers of the model that they are for."""

    def __init__(
        self, model: nn.Module, rename: Callable[[str], Any], head: str, names: list[str]
    ) -> None:
        """Raises: UnsupportedCheckpoint if what was asked for is not there."""
        self._model = model
        self._rename = rename
        self._has_int8_head = head == "int8"
        self._kept: list[str] = []  # linear maps that stay as they are
        self.group_size = max(GROUP_SIZES)  #: divides the inputs of all that are quantized
        #: the group of `config_groups` that a weight belongs to, by its stored name
        self.targets: dict[str, str] = {}
        for name in names:
            self._sort(name)
        if "Linear" not in self.targets.values():
            kind = type(model).__name__
            raise UnsupportedCheckpoint(f"a {kind} has no linear maps that can be quantized yet")
        if self._has_int8_head and _HEAD not in self.targets.values():
            raise UnsupportedCheckpoint("--head int8: the model's head is its embeddings")

    def _sort(self, name: str) -> None:
        if not name.endswith(".weight"):
            return
        path = name.removesuffix(".weight")
        renamed = self._rename(name)
        layer = find_layer(self._model, str(renamed).removesuffix(".weight"))
        if isinstance(layer, LinearWeights) and path.endswith("lm_head") and self._has_int8_head:
            self.targets[name] = _HEAD
        elif isinstance(layer, QuantizedLinear):
            self.targets[name] = "Linear"
            if isinstance(layer, Int4Linear):
                self.group_size = min(self.group_size, layer.group_size)
        elif isinstance(layer, nn.Linear) or not isinstance(renamed, str):
            self._kept.append(path)

    def ignored(self) -> list[str]:
        """Patterns of the linear maps that stay as they are, whatever comes before them in a name."""
        known = {part for name in self.targets for part in name.split(".")}
        patterns: dict[str, None] = {}
        for path in self._kept:
            parts = path.split(".")
            new = next((part for part in parts if part not in known), None)
            tail = "\\.".join(parts[1:]) if new is None else re.escape(new)
            patterns[f"re:.*{tail}$" if new in (None, parts[-1]) else f"re:.*{tail}\\..*"] = None
        return list(patterns)


def _tell(progress: Callable[[float], None] | None, share: float) -> None:
    if progress is not None:
        progress(share)


def _copy_text_files(source: Path, target: Path, quantization: dict[str, Any]) -> None:
    for pattern in _TEXT_FILES:
        for file in source.glob(pattern):
            if file.name not in (INDEX_FILE, "config.json"):
                shutil.copyfile(file, target / file.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = quantization
    text = json.dumps(config, indent=2) + "\n"
    (target / "config.json").write_text(text, encoding="utf-8")


def _weight_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in {tensor.file for tensor in list_tensors(directory)})


def run(model: str, target: Path, scheme: str, head: str = "none") -> None:
    """The command: `quantize_checkpoint` under a progress bar. Raises: SystemExit with the reason."""
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), transient=True) as bar:
        task = bar.add_task(f"{model} to {scheme}", total=1.0)
        try:
            source = resolve_model(model, lambda share: bar.update(task, completed=share))
            before, after = quantize_checkpoint(
                source,
                target,
                scheme,
                head=head,
                progress=lambda share: bar.update(task, completed=share),
            )
        except (ModelUnavailable, UnsupportedCheckpoint, OSError) as error:
            raise SystemExit(f"quantize: {error}") from None
    print(
        f"{target}: {scheme}, {before / 2**20:,.1f} MiB of weights became {after / 2**20:,.1f} MiB"
    )
