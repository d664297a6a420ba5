"""Transformer layers of BERT-like encoders over packed rows, with a fused QKV projection.

They replace the encoder in a transformers model; its embeddings and heads are kept. This file also has the modules that
sentence-transformers applies after the pooling. On a CPU, linear layers are replaced by faster ones. In float32 and
bfloat16, weights are reordered once for oneDNN, and an activation after the layer is fused. In int8, the kernels of the
torch engine are used.

Shape letters: T tokens of all rows, H heads, D head width, E hidden size, n rows, V numbers of a vector.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from engines.base import EngineStartError, UnsupportedCheckpoint
from engines.pooling.checkpoint import DenseConfig, Normalize
from engines.torch_backend.layers.activation import quick_gelu
from engines.torch_backend.layers.linear import INT8, Linear
from engines.torch_backend.layers.linear_group import LinearGroup, adopt
from engines.torch_backend.loading.stored_tensors import finite
from engines.torch_backend.ops.dense_attention.reference import DenseAttention, attend
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

#: Activations by oneDNN's name and algorithm.
_ACTIVATIONS: dict[tuple[str, str], Activation] = {
    ("gelu", "none"): F.gelu,
    ("gelu", "tanh"): lambda x: F.gelu(x, approximate="tanh"),
    ("relu", ""): F.relu,
    ("swish", ""): F.silu,
}


#: Activations that the kernels apply before a linear layer.
_BEFORE: dict[tuple[str, str], Activation] = {("gelu", "none"): F.gelu, _QUICK_GELU: quick_gelu}
#: Tokens of each row that the last layer computes.
Keeps = Literal["all", "first", "last"]

#: Names of the submodules in BERT and DistilBERT.
_BERT = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "activation": "intermediate.intermediate_act_fn",
    "down": "output.dense",
    "norm": "output.LayerNorm",
}
_DISTILBERT = {
    "query": "attention.q_lin",
    "key": "attention.k_lin",
    "value": "attention.v_lin",
    "out": "attention.out_lin",
    "attention_norm": "sa_layer_norm",
    "up": "ffn.lin1",
    "activation": "ffn.activation",
    "down": "ffn.lin2",
    "norm": "output_layer_norm",
}
#: Activations of torch.nn by name.
_MODULES: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        nn.ELU, nn.GELU, nn.Hardtanh, nn.Identity, nn.LeakyReLU, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU,
        nn.Sigmoid, nn.Softplus, nn.Tanh,
    )
}  # fmt: skip


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
    """Yield (module, *pair) for each pair of `names` that a module has, if one of the two is an nn.Linear."""
    for owner in list(model.modules()):
        for pair in names:
            parts = [getattr(owner, name, None) for name in pair]
            if None not in parts and any(type(part) is nn.Linear for part in parts):
                yield owner, *pair


def _name(activation: Activation) -> tuple[str, str] | None:
    """Name of an activation in oneDNN, found by comparing values; None if oneDNN lacks it."""
    x = torch.linspace(-6, 6, 97)
    found = activation(x)
    known = {**_ACTIVATIONS, _QUICK_GELU: lambda x: x * torch.sigmoid(_QUICK_GELU_FACTOR * x)}
    return next((k for k, each in known.items() if torch.allclose(each(x), found, atol=1e-6)), None)


@cache
def _is_right(dtype: torch.dtype) -> bool:
    """Whether oneDNN is available, and its results equal torch's for one and several rows."""
    has_avx = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    is_known = dtype in (torch.float32, torch.bfloat16)
    if not (is_known and has_avx and torch.backends.mkldnn.is_available()):
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


class Layer(nn.Module):
    """Self-attention within rows, and the feed-forward network."""

    def __init__(self, theirs: nn.Module, num_heads: int) -> None:
        """Uses the submodules of a transformers layer."""
        super().__init__()
        names = _BERT if hasattr(theirs, "intermediate") else _DISTILBERT
        part: dict[str, Any] = {mine: theirs.get_submodule(name) for mine, name in names.items()}
        self.num_heads = num_heads
        self.qkv = _join([part["query"], part["key"], part["value"]])
        self.out: nn.Module = part["out"]
        self.attention_norm: nn.Module = part["attention_norm"]
        self.up: nn.Module = part["up"]
        self.activation: nn.Module = part["activation"]
        self.down: nn.Module = part["down"]
        self.norm: nn.Module = part["norm"]

    def forward(
        self, x: Tensor, lengths: Sequence[int], attend: DenseAttention, kept: Tensor | None = None
    ) -> Tensor:
        """Shapes: (T, E) to (T, E), or to (kept tokens, E)."""
        query, key, value = self.qkv(x).view(len(x), 3, self.num_heads, -1).unbind(1)
        mixed = attend(query, key, value, [(n, n) for n in lengths])
        if kept is not None:
            mixed, x = mixed[kept], x[kept]
        x = self.attention_norm(_add(self.out, mixed, x))
        return self.norm(_add(self.down, self.activation(self.up(x)), x))


class PackedLayers(nn.Module):
    """All layers of an encoder. Use them within `rows`."""

    def __init__(self, theirs: Any, num_heads: int, device: torch.device) -> None:
        """Moves the layers out of `theirs` one by one."""
        super().__init__()
        self.layers = nn.ModuleList()
        while theirs.layer:
            self.layers.append(Layer(theirs.layer[0], num_heads))
            del theirs.layer[0]
        is_cpu = device.type == "cpu"
        self._attend: DenseAttention = cpu_ops("fast")["dense_attention"] if is_cpu else attend
        self._lengths: Sequence[int] = ()
        self._keeps: Keeps = "all"

    @contextmanager
    def rows(self, lengths: Sequence[int], keeps: Keeps) -> Iterator[None]:
        """Within this context, forward passes are over rows of these sorted lengths and return the kept tokens."""
        self._lengths, self._keeps = lengths, keeps
        try:
            yield
        finally:
            self._lengths = ()

    def forward(
        self, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Shapes: (1, T, E) to (1, kept tokens, E)."""
        x, kept = hidden_states[0], None
        for number, layer in enumerate(self.layers, 1):
            if number == len(self.layers) and self._keeps != "all":
                lengths = torch.tensor(self._lengths)
                ends = lengths.cumsum(0)
                kept = (ends - 1 if self._keeps == "last" else ends - lengths).to(x.device)
            x = layer(x, self._lengths, self._attend, kept)
        hidden: Any = x[None]
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)


def take_layers(model: Any, device: torch.device) -> PackedLayers:
    base, config = model.base_model, model.config
    name = "transformer" if hasattr(base, "transformer") else "encoder"
    layers = PackedLayers(getattr(base, name), config.num_attention_heads, device)
    setattr(base, name, layers)
    return layers


def _add(linear: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
    if isinstance(linear, PackedFloat):
        return linear.add(x, residual)
    return linear(x).add_(residual)


def _join(linears: Sequence[nn.Linear]) -> nn.Linear:
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = torch.cat([linear.bias.detach() for linear in linears])
    joined = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    joined.weight, joined.bias = nn.Parameter(weight, False), nn.Parameter(bias, False)
    return joined


class Dense(nn.Module):
    """A linear layer with activation, in float32."""

    def __init__(self, config: DenseConfig, directory: Path) -> None:
        """Raises: UnsupportedCheckpoint."""
        super().__init__()
        where = f"{config.folder}/config.json"
        module, _, name = config.activation.rpartition(".")
        if not module.startswith("torch.nn") or name not in _MODULES:
            raise UnsupportedCheckpoint(
                f"{where}: the activation {config.activation!r} is not supported; supported are "
                f"{', '.join(_MODULES)} of torch.nn"
            )
        self.activation = _MODULES[name]()
        self.linear = nn.Linear(config.num_inputs, config.num_outputs, config.has_bias)
        self.residual: Any = None
        if config.is_residual:
            is_same = config.num_inputs == config.num_outputs
            shape = (config.num_inputs, config.num_outputs)
            self.residual = nn.Identity() if is_same else nn.Linear(*shape, bias=False)
        self._load(directory / config.folder)
        self.requires_grad_(False).eval()

    def _load(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        if not file.is_file():
            raise UnsupportedCheckpoint(
                f"{folder.name} has no model.safetensors; pickled weights (.bin) are not read, because "
                "unpickling can run any code"
            )
        try:
            weights = {name: finite(name, x.float()) for name, x in load_file(file).items()}
            self.load_state_dict(weights)
        except (RuntimeError, SafetensorError, OSError) as error:
            raise UnsupportedCheckpoint(f"{folder.name}/model.safetensors: {error}") from error

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (n, V) to (n, V)."""
        y = self.activation(self.linear(x))
        return y if self.residual is None else y + self.residual(x)


class _Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)


def build_head(modules: Sequence[DenseConfig | Normalize], directory: Path) -> nn.Sequential:
    """The modules in order. Raises: UnsupportedCheckpoint."""
    return nn.Sequential(
        *(Dense(each, directory) if isinstance(each, DenseConfig) else _Unit() for each in modules)
    )


def num_outputs(modules: Sequence[DenseConfig | Normalize], num_inputs: int) -> int:
    """Size of the output vectors. Raises: UnsupportedCheckpoint if the sizes do not match."""
    for each in modules:
        if isinstance(each, DenseConfig):
            if each.num_inputs != num_inputs:
                raise UnsupportedCheckpoint(
                    f"{each.folder}/config.json: in_features is {each.num_inputs}, but its input has {num_inputs}"
                )
            num_inputs = each.num_outputs
    return num_inputs
