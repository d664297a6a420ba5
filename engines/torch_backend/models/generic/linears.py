"""The linear maps of transformers' decoder layers by our operators, in few bits if asked."""

import torch
from torch import Tensor, nn

from engines.torch_backend.layers.linear import Linear, LinearWeights, Precision
from engines.torch_backend.layers.quantization import Scheme
from engines.torch_backend.ops.registry import Ops


class OperatorLinear(nn.Module):
    """Takes the place of an `nn.Linear`, whose weights it holds in some form."""

    def __init__(self, weights: nn.Module) -> None:
        super().__init__()
        self.weights = weights
        self._linear = Linear(self, "weights")
        self._dtype: torch.dtype | None = None

    def bind(self, ops: Ops, dtype: torch.dtype) -> None:
        """Compute with these operators from now on."""
        self._linear.bind(ops, dtype)
        self._dtype = torch.float32 if ops.is_native else dtype  # of what kernels are given

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (..., K); returns (..., N)."""
        rows = x.reshape(-1, x.shape[-1])
        return self._linear(rows.to(self._dtype)).to(x.dtype).unflatten(0, x.shape[:-1])


def quantize_linears(model: nn.Module, layers: str, scheme: Scheme, dtype: torch.dtype) -> int:
    """Put quantized maps in place of those within `layers`; returns how many there are now."""
    names = linears_within(model, layers)
    num_quantized = 0
    for name in names:  # one after another: nothing here keeps what is replaced
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        with torch.device("meta"):
            shape = LinearWeights(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                precision=Precision.SCHEME,
            )
        if not scheme.fits(shape.whole_shape):
            continue
        quantized = scheme.create_linear(shape, dtype)
        parts = scheme.quantize(linear.weight.detach(), dtype)
        if linear.bias is not None:
            parts["bias"] = linear.bias.detach()
        quantized.load_state_dict(parts, assign=True)
        model.set_submodule(name, OperatorLinear(quantized.requires_grad_(False)))
        num_quantized += 1
    return num_quantized


def use_operators(model: nn.Module, layers: str, ops: Ops, dtype: torch.dtype) -> None:
    """Compute the maps within `layers` by operators, where there are kernels for their weights."""
    if ops.uses("linear_float", "cpu"):
        for name in linears_within(model, layers):
            model.set_submodule(name, OperatorLinear(model.get_submodule(name)))
    for module in model.modules():
        if isinstance(module, OperatorLinear):
            module.bind(ops, dtype)


def linears_within(model: nn.Module, layers: str) -> list[str]:
    """Names of plain linear maps; a class of its own may compute something else."""
    return [
        name
        for name, module in model.named_modules()
        if name.startswith(f"{layers}.")
        and type(module) is nn.Linear
        and not name.endswith(".weights")
    ]
