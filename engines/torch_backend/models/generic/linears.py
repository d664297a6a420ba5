"""The linear maps of transformers' decoder layers by our operators, in few bits if asked."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from engines.torch_backend.layers.linear import Linear, LinearWeights, Precision, Reordered
from engines.torch_backend.layers.quantization import Scheme
from engines.torch_backend.ops.native.packed_linear import PackedLinear
from engines.torch_backend.ops.registry import Ops
from engines.torch_backend.parallel.mesh import WHOLE, share_of
from engines.torch_backend.parallel.tp_plan import whole_weight


class OperatorLinear(nn.Module):
    """Takes the place of an `nn.Linear`, whose weights it holds in some form."""

    def __init__(self, weights: nn.Module) -> None:
        super().__init__()
        self.weights = weights
        self.siblings: Siblings | None = None
        self._linear = Linear(self, "weights")
        self._dtype: torch.dtype | None = None

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        """Compute with these operators from now on."""
        self._linear.bind(ops, dtype)
        self._dtype = torch.float32 if ops.is_native else dtype  # of what kernels are given

    def __getattr__(self, name: str) -> Any:
        """What some modules of transformers ask a map for, beside calling it."""
        held = self.__dict__["_modules"].get("weights")
        if name == "weight" and held is not None:
            return held.dequantized() if isinstance(held, PackedLinear) else held.weight
        if name == "bias" and held is not None:
            return held.bias
        if name in ("in_features", "out_features") and held is not None:
            inside = f"num_{'inputs' if name == 'in_features' else 'outputs'}"
            return getattr(held, inside if isinstance(held, PackedLinear) else name)
        return super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (..., K); returns (..., N)."""
        if self.siblings is not None and not self._linear.is_adapted:
            found = self.siblings.compute(self, x)
            if found is not None:
                return found
        if has_torch_function((x,)):  # a mode that splits it, which sees no kernel of ours
            return handle_torch_function(self._compute, (x,), x)
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self._linear(rows.to(self._dtype)).to(x.dtype).unflatten(0, x.shape[:-1])


class Siblings:
    """Maps that were seen to read one tensor: the first of them to be given one computes it with all."""

    def __init__(self, members: Sequence[OperatorLinear], ops: Ops, dtype: torch.dtype) -> None:
        self._members = members
        owner = nn.ModuleList(member.weights for member in members)
        self._linear = Linear(owner, *map(str, range(len(members))))
        self._linear.bind(ops, dtype)
        self._widths = [_num_outputs(member.weights) for member in members]
        self._input: Tensor | None = None
        self._outputs: dict[OperatorLinear, Tensor] = {}
        for member in members:
            member.siblings = self if self._linear.is_bound else None

    def compute(self, member: OperatorLinear, x: Tensor) -> Tensor | None:
        """One's output; None where it is to compute it alone. Shapes: (..., K); returns (..., N)."""
        if self._input is not x or member not in self._outputs:
            if x.shape[:-1].numel() > self._linear.product.max_tokens:
                return None
            rows = x.reshape(-1, x.shape[-1])
            parts = self._linear(rows.float()).split(self._widths, dim=1)
            shaped = [part.to(x.dtype).contiguous().unflatten(0, x.shape[:-1]) for part in parts]
            self._input, self._outputs = x, dict(zip(self._members, shaped, strict=True))
        output = self._outputs.pop(member)
        if not self._outputs:
            self._input = None
        return output


def quantize_linears(model: nn.Module, layers: str, scheme: Scheme, dtype: torch.dtype) -> int:
    """Put quantized maps in place of those within `layers`; returns how many there are now."""
    names = linears_within(model, layers)
    num_quantized = 0
    for name in names:  # one after another: nothing here keeps what is replaced
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        whole, share = whole_weight(linear), share_of(linear)
        with torch.device("meta"):
            shape = LinearWeights(
                whole.shape[1],
                whole.shape[0],
                bias=linear.bias is not None,
                precision=Precision.SCHEME,
                share=share,
            )
        if not scheme.fits(shape.whole_shape):
            continue
        quantized = scheme.create_linear(shape, dtype)
        quantized.share = WHOLE  # whoever holds it joins what members compute
        vars(quantized)["share_of_whole"] = share
        numbers = scheme.quantize(whole.to(linear.weight.device), dtype)
        parts = {part: share.cut(part, value) for part, value in numbers.items()}
        if linear.bias is not None:
            parts["bias"] = linear.bias.detach()
        quantized.load_state_dict(parts, assign=True)
        model.set_submodule(name, OperatorLinear(quantized.requires_grad_(False)))
        num_quantized += 1
    return num_quantized


def allow_int8(model: nn.Module, decoder: str, head: nn.Module | None) -> None:
    """Have the linear maps beside a decoder and its head, those of towers and projectors, be in int8 where kernels read it."""
    modules: list[tuple[str, Any]] = list(model.named_modules())
    for name, linear in modules:
        is_beside = type(linear) is nn.Linear and linear is not head
        if not is_beside or name.startswith(f"{decoder}.") or name.endswith(".weights"):
            continue
        _allow_int8_of(model, name, linear)


def allow_int8_head(model: Any) -> None:
    """Have the head be in int8, too, if it is a linear map of its own."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is nn.Linear and head.weight is not getattr(table, "weight", None):
        name = next(name for name, module in model.named_modules() if module is head)
        _allow_int8_of(model, name, head)


def _allow_int8_of(model: nn.Module, name: str, linear: nn.Linear) -> None:
    with torch.device("meta"):
        weights = LinearWeights(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            precision=Precision.INT8,
        )
    weights.load_state_dict(linear.state_dict(), assign=True)
    model.set_submodule(name, OperatorLinear(weights.requires_grad_(False)))


def use_operators(
    model: nn.Module,
    names: Sequence[str],
    siblings: Sequence[Sequence[str]],
    ops: Ops,
    dtype: torch.dtype,
) -> None:
    """Compute the maps of these names by operators, where there are kernels, and those of a group at once."""
    if ops.uses("linear_float", "cpu"):
        for name in names:
            module = model.get_submodule(name)
            if type(module) is nn.Linear:
                model.set_submodule(name, OperatorLinear(module))
    for module in model.modules():
        if isinstance(module, OperatorLinear):
            module.siblings = None
            module.bind(ops, dtype)
    for group in siblings if ops.is_native else ():
        members = [model.get_submodule(name) for name in group]
        Siblings([each for each in members if isinstance(each, OperatorLinear)], ops, dtype)


def stored_places(
    model: Any, linears: Collection[str], weights: Mapping[str, Tensor]
) -> dict[str, list[str]]:
    """Of a checkpoint's weights those that these maps alone have as they are, with the paths of the modules.

    The table of tokens may have one of them too. What is joined or cut on the way is another tensor.
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
        if all(paths) and x.untyped_storage().nbytes() >= x.nbytes:  # and stands for nothing
            places[name] = paths
    return places


def keep_stored(modules: Iterable[nn.Module], weight: Tensor, dtype: torch.dtype) -> None:
    """Give maps and a table of embeddings a weight of another type than they compute in, until operators read it."""
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
    """Whether some maps are in few bits."""
    return any(
        getattr(module, "op", None) in ("linear_int8", "linear_int4") for module in model.modules()
    )


def _num_outputs(weights: nn.Module) -> int:
    weights = weights.linear if isinstance(weights, Reordered) else weights
    found: Any = getattr(weights, "num_outputs", None) or weights.out_features
    return found


def linears_within(model: nn.Module, layers: str) -> list[str]:
    """Names of plain linear maps; a class of its own may compute something else."""
    return [
        name
        for name, module in model.named_modules()
        if name.startswith(f"{layers}.")
        and type(module) is nn.Linear
        and not name.endswith(".weights")
    ]
