"""Transformer layers of BERT-like encoders over packed rows, with a fused QKV projection.

They replace the encoder in a transformers model; its embeddings and heads are kept. The modules of
sentence-transformers behind the pooling follow.

Shape letters: T tokens of all rows, H heads, D head width, E hidden size, n rows, V numbers of a vector.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from engines.base import UnsupportedCheckpoint
from engines.pooling.checkpoint import DenseConfig, Normalize
from engines.pooling.linears import PackedFloat
from engines.torch_backend.loading.stored_tensors import finite
from engines.torch_backend.ops.dense_attention.reference import DenseAttention, attend
from engines.torch_backend.ops.registry import cpu_ops

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
_ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (
        nn.ELU, nn.GELU, nn.Hardtanh, nn.Identity, nn.LeakyReLU, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU,
        nn.Sigmoid, nn.Softplus, nn.Tanh,
    )
}  # fmt: skip


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
                kept = self._kept().to(x.device)
            x = layer(x, self._lengths, self._attend, kept)
        hidden: Any = x[None]
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)

    def _kept(self) -> Tensor:
        lengths = torch.tensor(self._lengths)
        ends = lengths.cumsum(0)
        return ends - 1 if self._keeps == "last" else ends - lengths


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
        if not module.startswith("torch.nn") or name not in _ACTIVATIONS:
            raise UnsupportedCheckpoint(
                f"{where}: the activation {config.activation!r} is not supported; supported are "
                f"{', '.join(_ACTIVATIONS)} of torch.nn"
            )
        self.activation = _ACTIVATIONS[name]()
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
                    f"{each.folder}/config.json: it takes {each.num_inputs} numbers, and is given {num_inputs}"
                )
            num_inputs = each.num_outputs
    return num_inputs
