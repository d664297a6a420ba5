"""Writes a copy of a checkpoint with a quantized decoder, as compressed-tensors: `vlm quantize`.

Tensors are read, rounded and written one by one, so memory is bounded by one file of the copy.
"""

import json
import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, TimeElapsedColumn
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from engines.packages.resolve import ModelUnavailable, resolve_model
from engines.torch_backend.layers.linear import (
    FLOAT,
    GROUP_SIZES,
    INT4,
    METHODS,
    Linear,
    QuantizedMethod,
)
from engines.torch_backend.loading.formats.compressed_tensors import to_config, to_parts
from engines.torch_backend.loading.formats.reader import Integers
from engines.torch_backend.loading.published import find_layer, find_published
from engines.torch_backend.loading.stored_tensors import (
    INDEX_FILE,
    MAX_SHARD_BYTES,
    TensorWriter,
    check_new,
    list_tensors,
    new_directory,
)
from engines.torch_backend.loading.weights import build_empty
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.generic.config import GenericConfig
from engines.torch_backend.models.generic.linears import linears_within
from engines.torch_backend.models.registry import find_family

_CHUNK_WEIGHTS = 1 << 18  # rounded at once, to bound temporary memory
_TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
_HEAD, _DECODER = "re:.*lm_head", "Linear"  # in `config_groups`


def quantize_checkpoint(
    source: Path,
    target: Path,
    scheme: str,
    *,
    head: str = "none",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[float], None] | None = None,
) -> tuple[int, int]:
    """Write a quantized copy of a checkpoint. `progress` receives the completed ratio, 0..1.

    `head`: "int8" quantizes the output head too. `target` appears when it is complete. Returns: bytes of the
    weights before and after. Raises: UnsupportedCheckpoint, FileExistsError, OSError.
    """
    check_new(target)
    family, config = find_family(source)
    rename = partial(family.rename, config=config)
    published, stored = find_published(source, list_tensors(source), torch.device("cpu"), rename)
    if published is not None and published.has_integers:
        raise UnsupportedCheckpoint("the checkpoint is already quantized; use the original")
    linears = [] if published is None else published.linears
    names = [tensor.name for tensor in stored] + [f"{linear.name}.weight" for linear in linears]
    model: nn.Module = build_empty(family, config, METHODS[scheme], torch.float32)
    if isinstance(config, GenericConfig):
        model = _stored_linears(config, METHODS[scheme])
    layers = _Layers(model, rename, head, names)
    with new_directory(target) as made:
        report = progress or (lambda share: None)
        writer = _Writer(made, max_shard_bytes, layers, scheme)
        total = sum(item.num_values for item in (*stored, *linears))
        done = 0
        for tensor in stored:
            value = tensor.map()
            writer.write(tensor.name, value, value.dtype)
            done += tensor.num_values
            report(done / total)
        for linear in linears:
            assert published is not None
            writer.write(f"{linear.name}.weight", published.read_numbers(linear), published.dtype)
            done += linear.num_values
            report(done / total)
        writer.close()
        _copy_text_files(source, made, to_config(writer.groups, layers.ignored()))
    return _weight_bytes(source), _weight_bytes(target)


class _Writer:
    """Writes weights, quantized if they are a target."""

    def __init__(
        self, directory: Path, max_shard_bytes: int, layers: "_Layers", scheme: str
    ) -> None:
        self.groups: dict[str, Integers] = {}  #: an example of each
        self._tensors = TensorWriter(directory, max_shard_bytes)
        self._layers = layers
        self._scheme = scheme

    def write(self, name: str, value: Tensor, dtype: torch.dtype) -> None:
        """Write a weight; `dtype`: of its floats. Raises: OSError."""
        kind = self._layers.targets.get(name)
        if kind is None:
            self._tensors.add(name, value if value.dtype == dtype else value.to(dtype))
            return
        if kind == _HEAD or self._scheme == "int8":
            integers = _round_int8(value, dtype)
        else:
            integers = _round_int4(value, dtype, self._layers.group_size)
        self.groups.setdefault(kind, integers)
        for part, tensor in to_parts(integers, dtype).items():
            self._tensors.add(f"{name.removesuffix('.weight')}.{part}", tensor)

    def close(self) -> None:
        """Write the last file. Raises: OSError."""
        self._tensors.close()


class _Layers:
    """Selects the weights to quantize, by the model's layers."""

    def __init__(
        self, model: nn.Module, rename: Callable[[str], Any], head: str, names: list[str]
    ) -> None:
        """Raises: UnsupportedCheckpoint if the head is to be quantized and there is none."""
        self._model = model
        self._rename = rename
        self._has_int8_head = head == "int8"
        self._kept: list[str] = []  # linear layers that stay as they are
        self.group_size = max(GROUP_SIZES)  #: divides the inputs of all quantized layers
        #: the group of `config_groups` that a weight belongs to, by its stored name
        self.targets: dict[str, str] = {}
        for name in names:
            self._sort(name)
        if _DECODER not in self.targets.values():
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
        if isinstance(layer, Linear) and path.endswith("lm_head") and self._has_int8_head:
            self.targets[name] = _HEAD
        elif isinstance(layer, Linear) and layer.method is not FLOAT:
            self.targets[name] = _DECODER
            if layer.method is INT4:
                self.group_size = min(self.group_size, layer.group_size)
        elif isinstance(layer, nn.Linear) or not isinstance(renamed, str):
            self._kept.append(path)

    def ignored(self) -> list[str]:
        """Patterns of the linear layers that stay as they are, with any prefix."""
        known = {part for name in self.targets for part in name.split(".")}
        patterns: dict[str, None] = {}
        for path in self._kept:
            parts = path.split(".")
            new = next((part for part in parts if part not in known), None)
            tail = "\\.".join(parts[1:]) if new is None else re.escape(new)
            patterns[f"re:.*{tail}$" if new in (None, parts[-1]) else f"re:.*{tail}\\..*"] = None
        return list(patterns)


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
    """The command: `quantize_checkpoint` with a progress bar. Raises: SystemExit with the reason."""
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), transient=True) as bar:
        task = bar.add_task(f"{model} to {scheme}", total=1.0)
        try:
            check_new(target)  # before a download
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


def _stored_linears(config: GenericConfig, scheme: QuantizedMethod) -> nn.Module:
    """The linear layers of a model, without weights, as in a checkpoint: the decoder's are those of a scheme.

    Raises: UnsupportedCheckpoint for a decoder without such layers.
    """
    with torch.device("meta"):
        model: Any = config.model_class(deepcopy(config.full))
    layers = getattr(model.get_decoder(), "layers", None)
    decoder = next((name for name, module in model.named_modules() if module is layers), None)
    inside = set() if decoder is None else {*linears_within(model, decoder)}
    state = model.state_dict()
    names = {id(x): name.removesuffix(".weight") for name, x in state.items()}
    root, num_found = nn.Module(), 0
    for stored, x in revert_weight_conversion(model, state).items():
        name = names.get(id(x))  # what is joined or cut on the way is another tensor
        linear = model.get_submodule(name) if name and stored.endswith(".weight") else None
        if type(linear) is not nn.Linear:
            continue
        with torch.device("meta"):
            made = Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
        if name in inside and scheme.fits((linear.out_features, linear.in_features)):
            scheme.create(made, torch.float32)
            num_found += 1
        place = root
        *path, last = stored.removesuffix(".weight").split(".")
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.add_module(last, made)
    if not num_found:
        kind = config.model_class.__name__
        raise UnsupportedCheckpoint(f"{kind} has no linear maps that can be in {scheme.name}")
    return root


def _round_int8(weight: Tensor, dtype: torch.dtype) -> Integers:
    """Round as `--quantization int8` does, with scales of `dtype`. Shapes: weight (N, K)."""
    parts = METHODS["int8"].quantize(weight, dtype)
    values = parts["integers"].view(torch.uint8) ^ 128
    return Integers(values, 8, weight.shape[1], parts["scale"].float()[None], None)


def _round_int4(weight: Tensor, dtype: torch.dtype, size: int) -> Integers:
    """Round to the nearest in groups of `size`, each with a scale and an integer zero. Shapes: weight (N, K)."""
    num_rows = max(1, _CHUNK_WEIGHTS // weight.shape[1])
    chunks = [_round_rows(rows.float(), size, dtype) for rows in weight.split(num_rows)]
    values, scale, zero = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return Integers(values, 4, size, scale.t().contiguous(), zero.t().contiguous())


def _round_rows(
    weight: Tensor, group_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    groups = weight.view(len(weight), -1, group_size)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).to(dtype).clamp(min=torch.finfo(dtype).tiny).float()
    zero = (-low / scale).round_().clamp_(0, 15)
    values = (groups / scale[..., None]).round_().add_(zero[..., None]).clamp_(0, 15)
    return values.to(torch.uint8).flatten(1), scale, zero
