"""Weight-only quantization of the decoder's linears: int8 per output channel, int4 per group of inputs.

Used by the loader. A scheme is two functions: `quantize` turns a weight into what `swap_linears` puts in the place of
the layers that ask for it: every `LinearWeights` of `Precision.SCHEME`, whatever its name, whose width groups divide.

Shape letters: K inputs, N outputs, G groups of inputs.
"""

from abc import ABC, abstractmethod
from typing import TypeGuard

import torch
from torch import Tensor, nn

from engines.base import UnsupportedCheckpoint
from engines.torch_backend.layers.linear import LinearWeights, Precision
from engines.torch_backend.layers.quantized_linear import (
    Int4Linear,
    Int8Linear,
    QuantizedLinear,
    choose_group_size,
    pack_pairs,
)
from engines.torch_backend.ops.cpu_level import CpuLevel
from engines.torch_backend.parallel.mesh import DIMS

_CHUNK_WEIGHTS = 1 << 18  # quantized at once: what is computed on the way stays small


class Scheme(ABC):
    """A way to keep the decoder's weights in fewer bits. `name` is what the command line calls it."""

    name: str

    def swap_linears(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Put quantized linears, with undefined weights, in place of those that ask for it and fit."""
        for name, module in list(model.named_modules()):
            if self._takes(module):
                model.set_submodule(name, self.create_linear(module, dtype))

    def _takes(self, module: nn.Module) -> TypeGuard[LinearWeights]:
        if not isinstance(module, LinearWeights) or module.precision is not Precision.SCHEME:
            return False
        return self.fits(module.whole_shape)

    def convert_linears(self, model: nn.Module) -> int:
        """Quantize the linears that ask for it and fit, one after another, scales as wide as weights; returns how many."""
        names = [name for name, module in model.named_modules() if self._takes(module)]
        for name in names:  # nothing here keeps what is replaced
            linear = model.get_submodule(name)
            assert isinstance(linear, LinearWeights)
            weight = linear.weight.detach()
            quantized = self.create_linear(linear, weight.dtype)
            parts = self.quantize(weight, weight.dtype)
            if linear.bias is not None:
                parts["bias"] = linear.bias.detach()
            quantized.load_state_dict(parts, assign=True)
            model.set_submodule(name, quantized.requires_grad_(False))
        return len(names)

    @abstractmethod
    def create_linear(self, linear: LinearWeights, dtype: torch.dtype) -> QuantizedLinear:
        """What takes the place of a linear, with undefined weights and scales of `dtype`.

        Raises: UnsupportedCheckpoint if members of its mesh cannot share such weights.
        """

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """A weight's parts, by their names in the linear. Shapes: weight (N, K)."""
        num_rows = max(1, _CHUNK_WEIGHTS // weight.shape[1])
        chunks = [self._quantize_rows(rows.float(), dtype) for rows in weight.split(num_rows)]
        return {
            part: torch.cat([chunk[part] for chunk in chunks], dim=DIMS[part][0])
            for part in chunks[0]
        }

    @abstractmethod
    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """What a quantized weight of this shape occupies."""

    @abstractmethod
    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether groups divide a weight."""

    @abstractmethod
    def _quantize_rows(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The parts of some outputs' float32 weights. Shapes: weight (n, K)."""


class Int8Scheme(Scheme):
    """Symmetric, one scale per output channel."""

    name = "int8"

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """N * K integers and N scales."""
        return shape[0] * shape[1] + shape[0] * dtype.itemsize

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether groups divide a weight."""
        return True

    def _quantize_rows(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        scale = scale.to(dtype).clamp(min=torch.finfo(dtype).tiny)
        integers = (weight / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return {"integers": integers, "scale": scale}

    def create_linear(self, linear: LinearWeights, dtype: torch.dtype) -> QuantizedLinear:
        """Every output can be shared, and every input."""
        shape = (linear.out_features, linear.in_features)
        return Int8Linear(shape, linear.bias, dtype, linear.share)


class Int4Scheme(Scheme):
    """Asymmetric, a scale and a zero per output channel and group of 64 (or 32) inputs."""

    name = "int4"

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """N * K half bytes, and a scale and a zero for each group."""
        num_groups = shape[1] // (choose_group_size(shape[1]) or shape[1])
        return shape[0] * shape[1] // 2 + 2 * num_groups * shape[0] * dtype.itemsize

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether groups divide a weight."""
        return choose_group_size(shape[1]) is not None

    def _quantize_rows(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        num_outputs, num_inputs = weight.shape
        groups = weight.view(num_outputs, -1, choose_group_size(num_inputs) or num_inputs)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        scale = ((high - low) / 15).clamp(min=torch.finfo(dtype).tiny).to(dtype)
        zero = (low + 8 * scale.float()).to(dtype)  # what the integer 8 stands for
        integers = (groups - zero.float()[..., None]) / scale.float()[..., None]
        pairs = pack_pairs(integers.round_().add_(8).clamp_(0, 15).to(torch.uint8))
        return {"pairs": pairs, "scale_zero": torch.stack([scale.t(), zero.t()], 2).contiguous()}

    def create_linear(self, linear: LinearWeights, dtype: torch.dtype) -> QuantizedLinear:
        """Groups stay whole. Raises: UnsupportedCheckpoint."""
        _, num_inputs = linear.whole_shape
        group = choose_group_size(num_inputs) or num_inputs
        if linear.in_features % group:
            raise UnsupportedCheckpoint(
                f"{linear.share.mesh.size} devices cannot share {num_inputs} int4 inputs in groups of "
                f"{group}; use --quantization int8"
            )
        shape = (linear.out_features, linear.in_features)
        return Int4Linear(shape, linear.bias, dtype, group, linear.share)


SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (Int8Scheme(), Int4Scheme())}


def prepare_linears(model: nn.Module, level: CpuLevel) -> None:
    """Bring loaded weights into the form that the fastest correct kernel reads."""
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            module.prepare(level)
