"""Linear layers and the formats of their weights: floats, int8 per output channel, int4 per group of inputs.

A `Linear` holds tensors. Its `LinearMethod` defines their names and arithmetic, and quantizes a float weight.
The reference implementation dequantizes a few outputs at a time; the kernels are in `ops.linear`.

Shape letters: M tokens, K inputs, N outputs, G groups of inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Index of the output dimension of each tensor of a layer.
OUTPUT_DIMS = {"weight": 0, "bias": 0, "integers": 0, "scale": 0, "pairs": 0, "scale_zero": 1}
STRIP_WEIGHTS = 1 << 21  #: weights converted to the inputs' dtype at a time: eight MB in float32
#: Weights dequantized at a time: two MB in float32, which stay in the CPU's cache until they are multiplied.
CHUNK_WEIGHTS = 1 << 19
GROUP_SIZES = (64, 32)
_QUANTIZE_WEIGHTS = 1 << 18  # weights quantized at a time, to bound temporary memory

#: How a layer can be quantized. `no`: never; `scheme`: to the model's scheme; `int8`: to int8, if the model is quantized
#: and a kernel reads int8.
Quantizable = Literal["no", "scheme", "int8"]


class Linear(nn.Linear):
    """A linear layer whose weights are in the format of its `method`."""

    order: Tensor | None

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        bias: bool = True,
        quantizable: Quantizable = "no",
    ) -> None:
        super().__init__(num_inputs, num_outputs, bias=bias)
        self.quantizable: Quantizable = quantizable
        self.method: LinearMethod = FLOAT
        self.group_size = 0  #: inputs per scale of int4 weights
        #: `LinearGroup` that runs this layer by an operator once it is bound; None: `method` runs the layer
        self.group: Any = None
        #: (K,) the input of each column, if the inputs of a quantization group are not adjacent
        self.register_buffer("order", None, persistent=False)

    def hold(
        self, method: "LinearMethod", tensors: Mapping[str, Tensor], group_size: int = 0
    ) -> None:
        """Replace the weights by tensors of another method; the bias stays if `tensors` has none."""
        self.method, self.group_size = method, group_size
        self._parameters.pop("weight", None)
        for name in self._buffers.keys() - {"order"}:
            delattr(self, name)
        for name, tensor in tensors.items():
            if name in ("weight", "bias"):
                self.register_parameter(name, nn.Parameter(tensor, False))
            else:
                self.register_buffer(name, tensor)

    def quantize(self, method: "QuantizedMethod", dtype: torch.dtype) -> None:
        weight = self.weight.detach()  # detached, or the scales would keep the autograd graph
        self.hold(method, method.quantize(weight, dtype), method.group_size_of(self))

    def __getattr__(self, name: str) -> Any:
        """Dequantizes `weight` for transformers' modules that read it."""
        method = self.__dict__.get("method", FLOAT)
        if name == "weight" and method is not FLOAT:
            return method.dequantize(self)
        return super().__getattr__(name)

    def forward(self, input: Tensor) -> Tensor:
        """Shapes: (..., K); returns (..., N)."""
        return apply(self, input) if self.group is None else self.group.forward(input)


class LinearMethod(ABC):
    """A weight format and its arithmetic. Instances are compared by identity."""

    op: str  #: name of the operator that multiplies by weights of this format

    def __deepcopy__(self, memo: dict[int, Any]) -> "LinearMethod":
        return self

    @abstractmethod
    def apply(self, layer: Any, x: Tensor) -> Tensor:
        """Reference arithmetic. Shapes: (M, K); returns (M, N)."""

    @abstractmethod
    def dequantize(self, layer: Any) -> Tensor:
        """Shapes: returns (N, K)."""


class FloatMethod(LinearMethod):
    """Float weights in their stored dtype, which can differ from the dtype of the inputs."""

    op = "linear_float"

    def apply(self, layer: Any, x: Tensor) -> Tensor:
        """Shapes: (M, K); returns (M, N)."""
        weight, bias = layer.weight, layer.bias
        if weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype):
            return F.linear(x, weight, bias)
        num_rows = max(1, STRIP_WEIGHTS // x.shape[-1])
        y = x.new_empty(*x.shape[:-1], len(weight))
        for start in range(0, len(weight), num_rows):
            rows = weight[start : start + num_rows].to(x.dtype)
            y[..., start : start + num_rows] = F.linear(x, rows)
        return y if bias is None else y.add_(bias)

    def dequantize(self, layer: Any) -> Tensor:
        return layer.weight


class QuantizedMethod(LinearMethod):
    """Integer weights with scales."""

    name: str  #: value of the setting `quantization`

    @abstractmethod
    def create(self, layer: Linear, dtype: torch.dtype, group_size: int | None = None) -> None:
        """Replace a layer's weight by meta tensors of this format, with scales of `dtype`."""

    @abstractmethod
    def _dequantize_rows(self, layer: Linear, start: int, stop: int) -> Tensor: ...

    @abstractmethod
    def _quantize_rows(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Quantize the float32 weights of some outputs. Shapes: weight (n, K)."""

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the inputs of a weight of this shape divide into groups."""
        return True

    def group_size_of(self, layer: Linear) -> int:
        """Inputs per scale; 0: one scale for all inputs."""
        return 0

    def num_bytes(
        self, shape: tuple[int, ...], dtype: torch.dtype, group_size: int | None = None
    ) -> int:
        """Memory of a quantized weight of this shape."""
        layer = empty_linear(shape[1], shape[0])
        self.create(layer, dtype, group_size)
        return sum(x.nbytes for x in layer.buffers())

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Quantize a weight; returns tensors by their names in the layer. Shapes: weight (N, K)."""
        num_rows = max(1, _QUANTIZE_WEIGHTS // weight.shape[1])
        chunks = [self._quantize_rows(rows.float(), dtype) for rows in weight.split(num_rows)]
        return {
            part: torch.cat([chunk[part] for chunk in chunks], dim=OUTPUT_DIMS[part])
            for part in chunks[0]
        }

    def dequantize(self, layer: Linear) -> Tensor:
        """Shapes: returns (N, K)."""
        return self._dequantize_rows(layer, 0, layer.out_features)

    def apply(self, layer: Linear, x: Tensor) -> Tensor:
        """Shapes: (M, K); returns (M, N)."""
        if x.device.type == "cpu":
            num_rows = max(1, CHUNK_WEIGHTS // x.shape[1])
            y = x.new_empty(x.shape[0], layer.out_features)
            for start in range(0, layer.out_features, num_rows):
                stop = min(start + num_rows, layer.out_features)
                y[:, start:stop] = F.linear(x, self._dequantize_rows(layer, start, stop))
        else:
            y = F.linear(x, self.dequantize(layer))
        return y if layer.bias is None else y + layer.bias


class Int8Method(QuantizedMethod):
    """Symmetric int8 with one scale per output channel. Shapes: integers (N, K), scale (N,)."""

    name, op = "int8", "linear_int8"

    def create(self, layer: Linear, dtype: torch.dtype, group_size: int | None = None) -> None:
        shape = layer.out_features, layer.in_features
        integers = torch.empty(shape, dtype=torch.int8, device="meta")
        scale = torch.empty(shape[0], dtype=dtype, device="meta")
        layer.hold(self, {"integers": integers, "scale": scale})

    def _dequantize_rows(self, layer: Linear, start: int, stop: int) -> Tensor:
        rows = layer.integers[start:stop].to(layer.scale.dtype)
        return rows.mul_(layer.scale[start:stop, None])

    def _quantize_rows(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        scale = _divide(weight.abs().amax(dim=1), 127).clamp(min=torch.finfo(torch.float32).tiny)
        scale = scale.to(dtype).clamp(min=torch.finfo(dtype).tiny)
        integers = (weight / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return {"integers": integers, "scale": scale}


class Int4Method(QuantizedMethod):
    """Asymmetric int4 with a scale and a zero per output channel and group: (integer - 8) * scale + zero.

    Shapes: pairs (N, K / 2), in which a byte holds the integers i and i + group_size / 2; scale_zero (G, N, 2).
    """

    name, op = "int4", "linear_int4"

    def create(self, layer: Linear, dtype: torch.dtype, group_size: int | None = None) -> None:
        """`group_size` None: the largest that divides the inputs."""
        size = group_size or self.group_size_of(layer)
        num_outputs, num_inputs = layer.out_features, layer.in_features
        pairs = torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8, device="meta")
        groups = (num_inputs // size, num_outputs, 2)
        scale_zero = torch.empty(groups, dtype=dtype, device="meta")
        layer.hold(self, {"pairs": pairs, "scale_zero": scale_zero}, size)

    def group_size_of(self, layer: Linear) -> int:
        return choose_group_size(layer.in_features) or layer.in_features

    def fits(self, shape: tuple[int, ...]) -> bool:
        return choose_group_size(shape[1]) is not None

    def _dequantize_rows(self, layer: Linear, start: int, stop: int) -> Tensor:
        integers = unpack_pairs(layer.pairs[start:stop], layer.group_size)
        scale, zero = layer.scale_zero[:, start:stop].transpose(0, 1).unbind(2)
        rows = integers.to(scale.dtype).sub_(8)
        return torch.addcmul(zero[..., None], rows, scale[..., None], out=rows).flatten(1)

    def _quantize_rows(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        num_outputs, num_inputs = weight.shape
        groups = weight.view(num_outputs, -1, choose_group_size(num_inputs) or num_inputs)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        scale = _divide(high - low, 15).clamp(min=torch.finfo(dtype).tiny).to(dtype)
        zero = (low + 8 * scale.float()).to(dtype)  # the value of the integer 8
        integers = (groups - zero.float()[..., None]) / scale.float()[..., None]
        pairs = pack_pairs(integers.round_().add_(8).clamp_(0, 15).to(torch.uint8))
        return {"pairs": pairs, "scale_zero": torch.stack([scale.t(), zero.t()], 2).contiguous()}


def _divide(x: Tensor, number: float) -> Tensor:
    """Divide exactly. On a GPU, torch multiplies by the reciprocal of a Python number, which rounds differently."""
    return x / x.new_tensor(number)


FLOAT, INT8, INT4 = FloatMethod(), Int8Method(), Int4Method()
#: The methods of `--quantization`.
METHODS: dict[str, QuantizedMethod] = {method.name: method for method in (INT8, INT4)}


def apply(layer: nn.Module, x: Tensor) -> Tensor:
    """Run the reference arithmetic of a layer, also of a layer of transformers. Shapes: (M, K); returns (M, N)."""
    order: Tensor | None = getattr(layer, "order", None)
    return method_of(layer).apply(layer, x if order is None else x[..., order])


def empty_linear(num_inputs: int, num_outputs: int, bias: bool = False) -> Linear:
    """A layer on the meta device."""
    with torch.device("meta"):
        return Linear(num_inputs, num_outputs, bias=bias).requires_grad_(False)


def method_of(layer: nn.Module) -> LinearMethod:
    """The method of a `Linear`; `FLOAT` for layers of transformers and tied embeddings."""
    return getattr(layer, "method", FLOAT)


def quantized_layers(model: nn.Module) -> list[tuple[Linear, QuantizedMethod]]:
    """Layers in int8 or int4 that are not packed for a kernel."""
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    return [(x, x.method) for x in layers if isinstance(x.method, QuantizedMethod)]


def quantizable_layers(model: nn.Module, method: QuantizedMethod) -> list[Linear]:
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    floats = [x for x in layers if x.quantizable == "scheme" and x.method is FLOAT]
    return [layer for layer in floats if method.fits((layer.out_features, layer.in_features))]


def choose_group_size(num_inputs: int) -> int | None:
    """The largest group size that divides the number of inputs; None if no group size does."""
    return next((size for size in GROUP_SIZES if num_inputs % size == 0), None)


def pack_pairs(integers: Tensor) -> Tensor:
    """Shapes: (N, G, K / G), values 0..15; returns (N, K / 2)."""
    low, high = integers.chunk(2, dim=2)
    return (low | (high << 4)).flatten(1)


def unpack_pairs(pairs: Tensor, group_size: int) -> Tensor:
    """Shapes: (N, K / 2); returns (N, G, K / G)."""
    groups = pairs.view(pairs.shape[0], -1, group_size // 2)
    return torch.cat([groups & 15, groups >> 4], dim=2)
