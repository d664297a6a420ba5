"""Linear layers in quantized formats of other projects, converted to the form that the kernels read.

A format without a kernel is dequantized to floats, and the log says so. The formats' readers are in `formats`.
"""

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from engines.torch_backend.layers.linear import INT4, INT8, Linear
from engines.torch_backend.layers.linear_group import adopt
from engines.torch_backend.loading.formats import detect
from engines.torch_backend.loading.formats.reader import Form, Integers, Reader, StoredLinear
from engines.torch_backend.loading.stored_tensors import StoredTensor, finite
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.models.generic.stand_ins import cast, find_stand_ins, make_stand_in
from engines.torch_backend.models.hf_config import read_fields, stored_dtype
from engines.torch_backend.models.registry import check_shape

logger = logging.getLogger(__name__)

Rename = Callable[[str], str | None]


class PublishedLinears:
    """The quantized linear layers of a checkpoint, while they are loaded into a model."""

    def __init__(
        self, reader: Reader, linears: list[StoredLinear], dtype: torch.dtype, rename: Rename
    ) -> None:
        """`dtype`: type of the checkpoint's floats. `rename`: maps stored names to the model's names."""
        self.linears = [x for x in linears if rename(f"{x.name}.weight") is not None]
        self.dtype = dtype
        self.name = reader.name
        self._reader = reader
        self._rename = rename
        self.layouts = {linear.name: reader.layout(linear) for linear in self.linears}
        self._num_bytes = 0  # in memory
        self._forms: Counter[Form] = Counter()
        #: weights that `replace_stand_ins` replaces by integers, by stored names; None: layers take integers directly
        self.stand_ins: dict[str, Tensor] | None = None
        #: layers to dequantize: transformers' model has no linear layer for them alone
        self._lost = {linear.name for linear in self.linears if "embed" in linear.name}

    @property
    def forms(self) -> set[Form]:
        """The forms of the stored layers, also of those that the model cannot hold as integers."""
        return {layout.form for layout in self.layouts.values()}

    def place(self, linear: StoredLinear, model: nn.Module) -> str | None:
        """Path of the model's layer for a stored layer's integers; None if the layer must be dequantized."""
        if self.layouts[linear.name].form == "float":
            return None
        path = (self._rename(f"{linear.name}.weight") or "").removesuffix(".weight")
        is_kept = self._rename(f"{linear.name}.scale") == f"{path}.scale"  # only paths differ
        return path if is_kept and isinstance(find_layer(model, path), Linear) else None

    def put(
        self, linear: StoredLinear, model: nn.Module, path: str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Prepare the model's layer for a stored layer's integers. Returns the layer's tensors, by stored names."""
        layout = self.layouts[linear.name]
        layer = model.get_submodule(path)
        assert isinstance(layer, Linear)
        check_shape(linear.name, layout.shape, (layer.out_features, layer.in_features))
        parts = self._read_integers(linear, layer, dtype)
        return {f"{linear.name}.{part}": tensor for part, tensor in parts.items()}

    def _read_integers(
        self, linear: StoredLinear, layer: Linear, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Prepare a layer for integers. Returns the layer's tensors, by buffer names."""
        layout, weights = self.layouts[linear.name], self._read(linear)
        assert isinstance(weights, Integers)
        self._forms[layout.form] += 1
        layer.order = weights.order
        if layout.form == "int8":
            INT8.create(layer, dtype)
            return weights.int8(dtype)
        parts = weights.int4(dtype)
        INT4.create(layer, dtype, layout.shape[1] // parts["scale_zero"].shape[0])
        return parts

    def stands_in(self, linear: StoredLinear) -> bool:
        """Whether a layer is loaded through a placeholder."""
        is_known = self.stand_ins is not None and linear.name not in self._lost
        return is_known and self.layouts[linear.name].form != "float"

    def stand_in(self, linear: StoredLinear) -> Tensor:
        """Create the placeholder of a layer. Shapes: returns (N, K)."""
        assert self.stand_ins is not None
        made = make_stand_in(self.layouts[linear.name].shape, len(self.stand_ins))
        self.stand_ins[linear.name] = made
        return cast(made, self.dtype)

    def replace_stand_ins(self, model: nn.Module, dtype: torch.dtype) -> bool:
        """Replace all placeholders by integers, with scales of this type.

        Returns False, without changes to the model, if placeholders are lost. The caller must then create the model
        again; the lost layers will be dequantized.
        """
        stand_ins = self.stand_ins or {}
        places = find_stand_ins(model, stand_ins)
        if len(places) < len(stand_ins):
            lost = stand_ins.keys() - places.keys()
            self._lost |= lost
            self.stand_ins = {}
            self._forms.clear()
            logger.info(
                "%s: %d linear layers, such as %s, are dequantized, because the model merges or splits them",
                self.name,
                len(lost),
                min(lost),
            )
            return False
        by_name = {linear.name: linear for linear in self.linears}
        for name, path in places.items():
            layer = adopt(model, path)
            device = layer.weight.device
            parts = self._read_integers(by_name[name], layer, dtype)
            tensors = {part: tensor.to(device) for part, tensor in parts.items()}
            layer.hold(layer.method, tensors, layer.group_size)
        return True

    def read_numbers(self, linear: StoredLinear) -> Tensor:
        """Dequantize the weights of a layer. Shapes: returns float32 (N, K)."""
        self._forms["float"] += 1
        weights = self._read(linear)
        return weights.numbers() if isinstance(weights, Integers) else weights

    def _read(self, linear: StoredLinear) -> Integers | Tensor:
        """Read weights and check that they are finite: `StoredTensor.map` checks neither FP8 nor blocks of GGUF."""
        weights = self._reader.read(linear)
        numbers = [weights]
        if isinstance(weights, Integers):
            numbers = [weights.scale, weights.zero, weights.base]
        for x in numbers:
            if isinstance(x, Tensor):
                finite(linear.name, x)
        return weights

    def drop_zero_biases(self, stored: list[StoredTensor], model: nn.Module) -> list[StoredTensor]:
        """Remove zero biases of layers without bias in the model; quantizers write a bias for every layer."""
        names = {f"{linear.name}.bias" for linear in self.linears}
        return [x for x in stored if x.name not in names or not self._is_spare(x, model)]

    def _is_spare(self, stored: StoredTensor, model: nn.Module) -> bool:
        layer = find_layer(model, (self._rename(stored.name) or "").removesuffix(".bias"))
        return isinstance(layer, nn.Linear) and layer.bias is None and not stored.map().any()

    def count_bytes(self, num_bytes: Callable[[StoredLinear, "PublishedLinears"], int]) -> int:
        self._num_bytes = sum(num_bytes(linear, self) for linear in self.linears)
        return self._num_bytes

    def finish(self) -> None:
        parts = [part for linear in self.linears for part in linear.parts.values()]
        before = sum(part.num_stored_bytes for part in parts)
        forms = ", ".join(f"{count} {_WORDS[form]}" for form, count in self._forms.items())
        logger.info(
            "%s: %d quantized linear layers (%s), %.1f MiB in files, %.1f MiB in memory",
            self.name,
            len(self.linears),
            forms,
            before / 2**20,
            self._num_bytes / 2**20,
        )


_WORDS: dict[Form, str] = {
    "int4": "as int4",
    "int8": "as int8",
    "float": "dequantized, which takes more memory",
}


def find_published(
    directory: Path, stored: list[StoredTensor], device: torch.device, rename: Rename
) -> tuple[PublishedLinears | None, list[StoredTensor]]:
    """The quantized layers, if any, and all other tensors. Raises: UnsupportedCheckpoint."""
    fields = read_fields(directory)
    reader = detect(fields)
    linears, others = ([], stored) if reader is None else reader.split(stored, device)
    for tensor in others:
        if tensor.kind == "F8_E4M3":
            raise UnsupportedCheckpoint(
                f"the weight {tensor.name} has type {tensor.kind}, but config.json has no "
                "quantization_config for its scale"
            )
    if reader is None:
        return None, others
    if not linears:
        raise UnsupportedCheckpoint(
            f"quantization_config of config.json is {reader.name}, but no layer has a tensor "
            f"{' or '.join(reader.marker)}"
        )
    return PublishedLinears(reader, linears, stored_dtype(fields), rename), others


def find_layer(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
