"""Replaces linear layers of a loaded transformers model by the fastest ones on a CPU.

In float32 and bfloat16, weights are reordered once for oneDNN, and an activation after the layer is fused; in int8
the kernels of the torch engine are used.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.base import EngineStartError
from engines.torch_backend.layers.activation import quick_gelu
from engines.torch_backend.layers.linear import INT8, Linear
from engines.torch_backend.layers.linear_group import LinearGroup, adopt
from engines.torch_backend.ops.linear.cpu import pack
from engines.torch_backend.ops.linear.reference import Prologue
from engines.torch_backend.ops.registry import cpu_ops

#: Names of a layer and the activation after it, in modules that apply one after the other.
_PAIRS = (("dense", "intermediate_act_fn"), ("up", "activation"), ("fc1", "activation_fn"))
#: Names of an activation and the layer after it.
_PAIRS_BEFORE = (("activation", "down"), ("activation_fn", "fc2"))
_QUICK_GELU_FACTOR = 1.702

_QUICK_GELU = ("quick_gelu", "")

Activation = Callable[[Tensor], Tensor]

#: By oneDNN's name and algorithm.
_ACTIVATIONS: dict[tuple[str, str], Activation] = {
    ("gelu", "none"): F.gelu,
    ("gelu", "tanh"): lambda x: F.gelu(x, approximate="tanh"),
    ("relu", ""): F.relu,
    ("swish", ""): F.silu,
}


#: Activations that the kernels apply before a product.
_BEFORE: dict[tuple[str, str], Activation] = {("gelu", "none"): F.gelu, _QUICK_GELU: quick_gelu}


class PackedFloat(nn.Module):
    """A linear layer in oneDNN's layout, with the activation after it."""

    def __init__(self, linear: nn.Linear, activation: tuple[str, str]) -> None:
        """`activation` is oneDNN's name and algorithm."""
        super().__init__()
        self.num_bytes = sum(x.numel() * x.element_size() for x in linear.parameters())
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), False)
        self._activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (..., K) to (..., N)."""
        name, algorithm = self._activation
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, name, [], algorithm)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds a residual to the output, without the activation. Shapes: (..., K), (..., N) to (..., N)."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.packed, self.bias, "add")


def pack_linears(model: nn.Module) -> None:
    """Reorder the linear layers of a model on the CPU for oneDNN."""
    dtypes = {x.dtype for x in model.parameters()}
    if not dtypes or not all(map(_is_right, dtypes)):
        return
    for owner, name, activation in _pairs(model, _PAIRS):
        linear = getattr(owner, name)
        known = _name(getattr(owner, activation))
        if known == _QUICK_GELU and type(getattr(owner, "fc2", None)) is nn.Linear:
            # x * sigmoid(c x) = swish(c x) / c: the factors move to the layers before and after.
            linear.weight.data *= _QUICK_GELU_FACTOR
            linear.bias.data *= _QUICK_GELU_FACTOR
            owner.fc2.weight.data /= _QUICK_GELU_FACTOR
            known = ("swish", "")
        if known not in (None, _QUICK_GELU):
            setattr(owner, name, PackedFloat(linear, known))
            setattr(owner, activation, nn.Identity())
    for name in _plain_names(model):  # one by one, so that replaced weights are freed
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(name, PackedFloat(linear, ("none", "")))


def quantize_linears(model: nn.Module) -> None:
    """Quantize the linear layers of a model on the CPU to int8. Raises: EngineStartError without a correct kernel."""
    if not cpu_ops("fast").uses("linear_int8", "cpu"):
        raise EngineStartError(
            "VLM_ENGINE__QUANTIZATION: int8 requires the C++ kernels, which are not available (see the log): set it to none"
        )
    for owner, name, linear in _pairs(model, _PAIRS_BEFORE):
        if (activation := _BEFORE.get(_name(getattr(owner, name)) or ("", ""))) is not None:
            _quantize(owner, linear, Prologue(activation=activation))
            setattr(owner, name, nn.Identity())
    for name in _plain_names(model):
        _quantize(model, name)


def num_bytes(model: nn.Module) -> int:
    packed = [each for each in model.modules() if isinstance(each, PackedFloat)]
    inside = {id(x) for each in packed for x in each.parameters()}
    integers = [each for each in model.modules() if isinstance(each, Linear)]
    others = [x for x in model.parameters() if id(x) not in inside]
    others += [x for each in integers for x in each.buffers()]
    return sum(each.num_bytes for each in packed) + sum(x.nbytes for x in others)


def _quantize(owner: nn.Module, name: str, before: Prologue = Prologue()) -> None:
    layer = adopt(owner, name)
    layer.quantize(INT8, torch.float32)
    pack(layer)
    group = layer.group = LinearGroup(layer, before=before)
    group.bind(cpu_ops("fast"), torch.float32)


def _plain_names(model: nn.Module) -> list[str]:
    return [name for name, each in model.named_modules() if type(each) is nn.Linear]


def _pairs(model: nn.Module, names: Iterable[tuple[str, str]]) -> Iterator[tuple[Any, str, str]]:
    """Modules with both layers of a pair of `names`, at least one of them not quantized, and that pair."""
    for owner in list(model.modules()):
        for pair in names:
            parts = [getattr(owner, name, None) for name in pair]
            if None not in parts and any(type(part) is nn.Linear for part in parts):
                yield owner, *pair


def _name(activation: Activation) -> tuple[str, str] | None:
    """Name of an activation in oneDNN, found by its values. None if it has none."""
    x = torch.linspace(-6, 6, 97)
    found = activation(x)
    known = {**_ACTIVATIONS, _QUICK_GELU: lambda x: x * torch.sigmoid(_QUICK_GELU_FACTOR * x)}
    return next((k for k, each in known.items() if torch.allclose(each(x), found, atol=1e-6)), None)


@cache
def _is_right(dtype: torch.dtype) -> bool:
    """Whether oneDNN is available and equals torch, for one and several rows."""
    if (
        not torch.backends.mkldnn.is_available()
        or not torch.backends.cpu.get_cpu_capability().startswith("AVX")
    ):
        return False
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    linear = nn.Linear(96, 80, dtype=dtype).requires_grad_(False)
    linear.weight.copy_(torch.sin(torch.arange(80 * 96.0) * 0.7).view(80, 96) * 0.2)
    linear.bias.copy_(torch.cos(torch.arange(80.0)))
    x = torch.sin(torch.arange(33 * 96.0) * 0.3).view(33, 96).to(dtype)
    eps = torch.finfo(dtype).eps
    try:
        for name, activation in {("none", ""): nn.Identity(), **_ACTIVATIONS}.items():
            packed, expected = PackedFloat(linear, name), activation(linear(x))
            for found, wanted in ((packed(x), expected), (packed(x[None, :1]), expected[None, :1])):
                if not torch.allclose(found, wanted, atol=32 * eps, rtol=16 * eps):
                    return False
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return True
