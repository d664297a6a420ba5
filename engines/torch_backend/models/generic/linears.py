"""Linear layers of transformers' decoders that our operators run, optionally quantized."""

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.layers.linear import FLOAT, Linear
from engines.torch_backend.layers.linear_group import adopt
from engines.torch_backend.ops.registry import Ops


def allow_int8(model: nn.Module, decoder: str, head: nn.Module | None) -> None:
    """Allow int8 for the linear layers outside a decoder and its head: towers and projectors."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not head and not name.startswith(f"{decoder}."):
            adopt(model, name).quantizable = "int8"


def bind_layers(model: nn.Module, ops: Ops, dtype: torch.dtype) -> None:
    """Bind linear layers. Without a kernel, float layers run in torch."""
    for layer in model.modules():
        if (
            isinstance(layer, Linear)
            and layer.group is not None
            and (layer.method is not FLOAT or ops.uses("linear_float", "cpu"))
        ):
            layer.group.bind(ops, dtype)


def stored_places(
    model: Any, linears: Collection[str], weights: Mapping[str, Tensor]
) -> dict[str, list[str]]:
    """For each weight that only these layers or the embedding table use: paths of modules that hold that tensor."""
    table = model.get_input_embeddings()
    readers: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for path, module in model.named_modules():
        is_read = path in linears or (module is table and type(module) is nn.Embedding)
        for part, x in module.named_parameters(recurse=False):
            is_matrix = is_read and part == "weight" and x.is_contiguous()
            readers.setdefault((x.data_ptr(), x.shape), []).append(path if is_matrix else "")
    places = {}
    for name, x in weights.items():
        paths = readers.get((x.data_ptr(), x.shape), [""])
        if all(paths) and x.untyped_storage().nbytes() >= x.nbytes:  # and is not a placeholder
            places[name] = paths
    return places


def keep_stored(modules: Iterable[nn.Module], weight: Tensor, dtype: torch.dtype) -> None:
    """Set `weight` in its stored dtype. Forward calls convert it to `dtype`, until operators that read it are bound."""
    parameter = nn.Parameter(weight, requires_grad=False)

    def embed(input: Tensor) -> Tensor:
        return F.embedding(input, weight).to(dtype)

    for module in modules:
        module.register_parameter("weight", parameter)
        forward: Any = embed if isinstance(module, nn.Embedding) else partial(_widened, module)
        module.forward = forward


def _widened(linear: Any, input: Tensor) -> Tensor:
    return F.linear(input, linear.weight.to(input.dtype), linear.bias)


def linears_within(model: nn.Module, layers: str) -> list[str]:
    """Names of the float linear layers below `layers`, but not of subclasses: they can compute something else."""
    return [
        name
        for name, module in model.named_modules()
        if name.startswith(f"{layers}.")
        and (type(module) is nn.Linear or (type(module) is Linear and module.method is FLOAT))
    ]
