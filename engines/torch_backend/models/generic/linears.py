"""Linear layers of transformers' decoders that run by our operators, optionally quantized."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.layers.linear import FLOAT, Linear, QuantizedMethod
from engines.torch_backend.layers.linear_group import LinearGroup, LinearSiblings, adopt
from engines.torch_backend.ops.registry import Ops


def quantize_linears(
    model: nn.Module, layers: str, scheme: QuantizedMethod, dtype: torch.dtype
) -> int:
    num_quantized = 0
    for name in linears_within(model, layers):
        layer = adopt(model, name)
        if scheme.fits((layer.out_features, layer.in_features)):
            layer.quantize(scheme, dtype)
            num_quantized += 1
    return num_quantized


def allow_int8(model: nn.Module, decoder: str, head: nn.Module | None) -> None:
    """Allow int8 for the linear layers outside a decoder and its head: towers and projectors."""
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not head and not name.startswith(f"{decoder}."):
            adopt(model, name).quantizable = "int8"


def allow_int8_head(model: Any) -> None:
    """Allow int8 for the head, if its weight is not tied."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is nn.Linear and head.weight is not getattr(table, "weight", None):
        name = next(name for name, module in model.named_modules() if module is head)
        adopt(model, name).quantizable = "int8"


def use_operators(
    model: nn.Module,
    names: Sequence[str],
    siblings: Sequence[Sequence[str]],
    ops: Ops,
    dtype: torch.dtype,
) -> None:
    """Run these layers by operators if kernels support them, and the layers of a group as one."""
    for name in names:
        adopt(model, name)
    bind_layers(model, ops, dtype)
    for group in siblings if ops.is_native else ():
        layers = [model.get_submodule(name) for name in group]
        groups = [each.group for each in layers if isinstance(each, Linear)]
        bound = [each for each in groups if isinstance(each, LinearGroup) and each.is_bound]
        if len(bound) > 1:
            LinearSiblings(bound, ops, dtype)


def bind_layers(model: nn.Module, ops: Ops, dtype: torch.dtype) -> None:
    """Bind layers that run alone. Without a kernel, float layers run in torch."""
    for layer in model.modules():
        if isinstance(layer, Linear) and isinstance(layer.group, LinearGroup):
            layer.group.siblings = None
            if layer.method is not FLOAT or ops.uses("linear_float", "cpu"):
                layer.group.bind(ops, dtype)


def stored_places(
    model: Any, linears: Collection[str], weights: Mapping[str, Tensor]
) -> dict[str, list[str]]:
    """Weights of a checkpoint that only these layers and the embedding table use, with the paths of their modules.

    Weights that are merged or split while loading are not included.
    """
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
    """Give layers a weight in its stored type, which each call converts until operators read the weight directly."""
    parameter = nn.Parameter(weight, requires_grad=False)

    def embed(input: Tensor) -> Tensor:
        return F.embedding(input, weight).to(dtype)

    for module in modules:
        module.register_parameter("weight", parameter)
        forward: Any = embed if isinstance(module, nn.Embedding) else partial(_widened, module)
        module.forward = forward


def _widened(linear: Any, input: Tensor) -> Tensor:
    return F.linear(input, linear.weight.to(input.dtype), linear.bias)


def has_quantized(model: nn.Module) -> bool:
    return any(isinstance(m, Linear) and m.method is not FLOAT for m in model.modules())


def linears_within(model: nn.Module, layers: str) -> list[str]:
    """Names of float linear layers, without subclasses, which may compute something else."""
    return [
        name
        for name, module in model.named_modules()
        if name.startswith(f"{layers}.")
        and (type(module) is nn.Linear or (type(module) is Linear and module.method is FLOAT))
    ]
