"""Loads a checkpoint's weights into a model: maps tensors if possible, else converts or quantizes them one by one.

On a CPU, a weight that is stored in the engine's precision is not copied: the model uses the mapped file, whose pages
all workers of a machine share. A file in use can therefore be replaced, as `save_pretrained` and downloads do, but must
not be overwritten in place.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engines.base import EngineStartError
from engines.torch_backend.layers.linear import (
    FLOAT,
    Linear,
    QuantizedMethod,
    quantizable_layers,
    quantized_layers,
)
from engines.torch_backend.loading.formats.reader import StoredLinear
from engines.torch_backend.loading.gguf_checkpoint import list_weights
from engines.torch_backend.loading.published import PublishedLinears, find_layer, find_published
from engines.torch_backend.loading.stored_tensors import StoredTensor
from engines.torch_backend.memory import free_bytes
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.registry import FamilyModel, ModelFamily
from engines.torch_backend.ops.linear.cpu import pack_int8_beside, pack_linears
from engines.torch_backend.ops.native.library import FLOAT_KINDS
from engines.torch_backend.ops.registry import Ops


class ModelTooLarge(EngineStartError):
    """The weights do not fit into the device's memory. The message has both sizes and what to try."""


def require_memory(num_bytes: float, device: torch.device, how: str) -> None:
    """Check that weights fit a device's free memory. Raises: ModelTooLarge."""
    available = free_bytes(device)
    if num_bytes > available:
        raise ModelTooLarge(
            f"the weights need {num_bytes / 2**30:.1f} GiB {how}, but {device} has {available / 2**30:.1f} GiB "
            "available; try bfloat16, --quantization int8 or int4, or a smaller model"
        )


@dataclass(eq=False)
class WeightReader:
    """Reads a checkpoint's tensors to a device, in the dtypes and quantization of the model's layers."""

    #: The model to load into, possibly without weights. Its quantized layers already have the method `scheme`.
    model: nn.Module
    rename: Callable[[str], str | None]
    scheme: QuantizedMethod | None
    device: torch.device
    dtype: torch.dtype | None = None  #: dtype of loaded floats; None: each tensor's own
    #: Matrices stored in these dtypes are not converted, because C++ kernels read them.
    kept: frozenset[torch.dtype] = frozenset()
    quantize_s: float = 0.0  #: time spent on quantizing

    def read(self, stored: StoredTensor) -> dict[str, Tensor]:
        """The tensor, or its quantized parts, by stored name."""
        value = stored.map()
        return self._convert(stored.name, value, value.dtype)

    def read_linear(self, linear: StoredLinear, published: PublishedLinears) -> dict[str, Tensor]:
        """A layer in a published format, by stored names: integers if the model can hold them, else floats."""
        path = published.place(linear, self.model)
        if path is not None:
            return published.put(linear, self.model, path, self.dtype_of_scales(published))
        if published.stands_in(linear):
            return {f"{linear.name}.weight": published.stand_in(linear)}
        numbers = published.read_numbers(linear)
        return self._convert(f"{linear.name}.weight", numbers, published.dtype)

    def _convert(self, stored_name: str, value: Tensor, stored: torch.dtype) -> dict[str, Tensor]:
        layer, name = self._find(stored_name)
        prefix = stored_name.removesuffix(name)
        is_float = value.is_floating_point()
        dtype = self._dtype_in(layer, value.shape, stored) if is_float else value.dtype
        if self.scheme is None or not _is_quantized(layer, name):
            return {stored_name: value.to(self.device, dtype)}
        started = time.perf_counter()
        parts = self.scheme.quantize(value.to(self.device), dtype)
        self.quantize_s += time.perf_counter() - started
        return {prefix + part: tensor for part, tensor in parts.items()}

    def num_bytes(self, stored: StoredTensor, stored_dtype: torch.dtype | None = None) -> int:
        """Bytes of the tensor in memory after loading. `stored_dtype`: replaces the dtype in the tensor's header."""
        layer, name = self._find(stored.name)
        dtype = self._dtype_in(layer, stored.shape, stored_dtype or stored.dtype)
        if self.scheme is not None and _is_quantized(layer, name):
            return self.scheme.num_bytes(stored.shape, dtype)
        return stored.num_bytes(dtype)

    def num_linear_bytes(self, linear: StoredLinear, published: PublishedLinears) -> int:
        """Bytes in memory, after loading, of a linear layer in a published format."""
        layout = published.layouts[linear.name]
        is_placed = published.place(linear, self.model) is not None
        if is_placed or published.stands_in(linear):
            return layout.num_bytes(self.dtype_of_scales(published))
        part = next(iter(linear.parts.values()))
        numbers = StoredTensor(f"{linear.name}.weight", part.file, layout.shape, "F32")
        return self.num_bytes(numbers, published.dtype)

    def _find(self, stored_name: str) -> tuple[nn.Module | None, str]:
        """The layer that a stored tensor belongs to, and the tensor's name in the layer."""
        path, _, name = (self.rename(stored_name) or "").rpartition(".")
        if not stored_name.endswith(name):
            return None, stored_name
        # an unknown weight has no layer; `FamilyModel.take` later raises an error that names it
        return find_layer(self.model, path), name

    def _dtype_in(
        self, layer: nn.Module | None, shape: tuple[int, ...], stored: torch.dtype
    ) -> torch.dtype:
        """The dtype of a loaded tensor or its scales. Matrices keep their stored dtype if a kernel reads it."""
        is_unmade = layer is None and getattr(self.model, "converts_weights", False)
        is_matrix = is_unmade or isinstance(layer, nn.Linear | nn.Embedding)
        is_kept = is_matrix and len(shape) == 2 and stored in self.kept
        return stored if is_kept else self.dtype or stored

    def dtype_of_scales(self, published: PublishedLinears) -> torch.dtype:
        """float32 for C++ kernels, because it represents all stored scales exactly; else the engine's dtype."""
        return torch.float32 if self.kept else self.dtype or published.dtype


def _is_quantized(layer: nn.Module | None, name: str) -> bool:
    return isinstance(layer, Linear) and layer.method is not FLOAT and name == "weight"


def load_model(
    directory: Path,
    family: ModelFamily,
    config: Any,
    device: torch.device,
    dtype: torch.dtype,
    scheme: QuantizedMethod | None = None,
    progress: Callable[[float], None] | None = None,
    seconds: dict[str, float] | None = None,
    ops: Ops | None = None,
) -> FamilyModel:
    """Load a checkpoint, and quantize its decoder if `scheme` is given.

    `progress` is called with the completed ratio. With a scheme, `seconds["quantize"]` is set to the time of
    quantization. If `ops` are C++ kernels, weights are packed for them, so the caller must bind the model to the same
    `ops`; beside a quantized decoder, a float32 engine then quantizes tower and projector to int8.
    Raises: UnsupportedCheckpoint, ModelTooLarge.
    """
    stored = list_weights(directory)
    rename = partial(family.rename, config=config)
    if _has_own_head(stored, rename):
        config = replace(config, text=replace(config.text, tie_word_embeddings=False))
        rename = partial(family.rename, config=config)
    published, stored = find_published(directory, stored, device, rename)
    form = choose_form(scheme, published)
    model = build_empty(family, config, form, dtype)
    # operators read matrices of these types as they are stored
    kept = frozenset(FLOAT_KINDS if ops is not None and ops.uses("linear_float", "cpu") else ())
    reader = WeightReader(model, rename, form, device, dtype, kept)
    converting_reader = WeightReader(model, rename, form, device, dtype)  # converts all matrices
    stored = [tensor for tensor in stored if rename(tensor.name) is not None]
    if published is not None:
        stored = published.drop_zero_biases(stored, model)
        if model.converts_weights:
            published.stand_ins = {}

    def check_size(by: WeightReader, kept_names: Collection[str] = ()) -> None:
        """Check that tensors fit: `kept_names` as `reader` reads them, others as `by` does. Raises: ModelTooLarge."""
        needed = sum(
            (reader if tensor.name in kept_names else by).num_bytes(tensor) for tensor in stored
        )
        needed += published.count_bytes(by.num_linear_bytes) if published else 0
        kind = f"{str(dtype).removeprefix('torch.')}{f' and {scheme.name}' if scheme else ''}"
        require_memory(needed, device, f"in {kind}")

    def load_into(model: FamilyModel) -> FamilyModel:
        plain = WeightReader(model, rename, None, torch.device("cpu"), None)
        chosen = plain if model.converts_weights else reader
        read = _read_all(chosen, stored, published, progress or (lambda ratio: None))
        check_room = partial(check_size, converting_reader)
        return model.take(read, family, device, dtype, kept, check_room)

    check_size(reader)
    model = load_into(model)
    while published is not None and not published.replace_stand_ins(
        model, reader.dtype_of_scales(published)
    ):
        check_size(reader)
        model = load_into(build_empty(family, config, form, dtype))
    if published is not None:
        published.finish()
    if form is not None:
        model.quantize(form, dtype)
    started = time.perf_counter()
    if ops is not None and ops.is_native:
        _pack(model, ops, dtype)
    if scheme is not None and seconds is not None:
        seconds["quantize"] = reader.quantize_s + time.perf_counter() - started
    return model.requires_grad_(False).eval()


def _has_own_head(stored: list[StoredTensor], rename: Callable[[str], str | None]) -> bool:
    """Whether a stored head differs from the embeddings that `config.json` ties it to; transformers then loads both."""
    heads = [x for x in stored if x.name.endswith("lm_head.weight") and rename(x.name) is None]
    tables = [x for x in stored if x.name.endswith("embed_tokens.weight")]
    return bool(heads and tables) and not torch.equal(heads[0].map(), tables[0].map())


def _pack(model: FamilyModel, ops: Ops, dtype: torch.dtype) -> None:
    is_quantized = bool(quantized_layers(model))
    pack_linears(model, ops, dtype)
    if is_quantized:
        model.allow_int8_head()
        # in 16-bit floats, torch is faster for the many tokens of an image
        if dtype == torch.float32 and ops.uses("linear_int8", "cpu"):
            model.allow_int8_beside()
        pack_int8_beside(model, ops)


def build_empty(
    family: ModelFamily, config: Any, scheme: QuantizedMethod | None, dtype: torch.dtype
) -> FamilyModel:
    """Build the model on the meta device, with quantizable layers in the format of `scheme`."""
    with torch.device("meta"):
        model = family.build(config)
    if scheme is not None:
        for layer in quantizable_layers(model, scheme):
            scheme.create(layer, dtype)
    return model


def choose_form(
    scheme: QuantizedMethod | None, published: PublishedLinears | None
) -> QuantizedMethod | None:
    """The scheme to quantize with; None to load the weights as stored. Raises: UnsupportedCheckpoint."""
    if scheme is None or published is None or published.forms == {"float"}:
        return scheme
    if scheme.name in published.forms:
        return None
    raise UnsupportedCheckpoint(
        f"the checkpoint is already quantized to {published.name}; for --quantization {scheme.name}, "
        "use the full-precision checkpoint"
    )


def _read_all(
    reader: WeightReader,
    stored: list[StoredTensor],
    published: PublishedLinears | None,
    progress: Callable[[float], None],
) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    linears = [] if published is None else published.linears
    total = sum(item.num_values for item in (*stored, *linears))
    done = 0
    for item in (*stored, *linears):
        if isinstance(item, StoredTensor):
            weights |= reader.read(item)
        elif published is not None:
            weights |= reader.read_linear(item, published)
        done += item.num_values
        progress(done / total)
    return weights
