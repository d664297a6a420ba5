"""Weight-only quantization of the decoder's linears: int8 per output channel, int4 per group of inputs.

Used by the loader. A scheme is two functions: `quantize_state_dict` turns weights into what `swap_linears`
puts in the place of `nn.Linear`. Embeddings, output head, vision tower and projector keep their precision (CPU
kernels have the last two in int8, see `pack_tower`), and so does a linear whose width no group divides.

Shape letters: K inputs, N outputs, G groups of inputs.
"""

import re
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from engines.torch_backend.layers.quantized_linear import (
    Int4Linear,
    Int8Linear,
    QuantizedLinear,
    choose_group_size,
    pack_pairs,
)
from engines.torch_backend.ops.cpu_level import CpuLevel

_CHUNK_WEIGHTS = 1 << 18  # quantized at once: what is computed on the way stays small

_DECODER_LINEAR = re.compile(
    r"(?:^|\.)layers\.\d+\.(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)\.weight$"
)


class Scheme(ABC):
    """A way to keep the decoder's weights in fewer bits. `name` is what the command line calls it."""

    name: str
    _row_dims: dict[str, int]  #: names of a quantized weight's parts, and which dimension is N

    def applies_to(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a weight, by its name in a checkpoint or in the model, is quantized."""
        is_decoder = "vision_tower" not in name and _DECODER_LINEAR.search(name) is not None
        return is_decoder and len(shape) == 2 and self._fits(shape)

    def quantize_state_dict(
        self, weights: dict[str, Tensor], dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Replace the weights that the scheme applies to. `dtype` is that of scales and of the others."""
        quantized: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if self.applies_to(name, tuple(weight.shape)):
                prefix = name.removesuffix("weight")
                for part, tensor in self.quantize(weight, dtype).items():
                    quantized[prefix + part] = tensor
            else:
                quantized[name] = weight.to(dtype)
        return quantized

    def swap_linears(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Put quantized linears in place of those that the scheme applies to, with undefined weights."""
        for name, module in list(model.named_modules()):
            if not isinstance(module, nn.Linear):
                continue
            shape = (module.out_features, module.in_features)
            if self.applies_to(f"{name}.weight", shape):
                parent, _, child = name.rpartition(".")
                linear = self._create_linear(shape, module.bias, dtype)
                setattr(model.get_submodule(parent), child, linear)

    def prepare(self, model: nn.Module, level: CpuLevel) -> None:
        """Bring loaded weights into the form that the fastest correct kernel reads."""
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module.prepare(level)

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """A weight's parts, by their names in the linear. Shapes: weight (N, K)."""
        num_rows = max(1, _CHUNK_WEIGHTS // weight.shape[1])
        chunks = [self._quantize_rows(rows.float(), dtype) for rows in weight.split(num_rows)]
        return {
            part: torch.cat([chunk[part] for chunk in chunks], dim=self._row_dims[part])
            for part in self._row_dims
        }

    @abstractmethod
    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """What a quantized weight of this shape occupies."""

    @abstractmethod
    def _fits(self, shape: tuple[int, ...]) -> bool: ...

    @abstractmethod
    def _quantize_rows(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The parts of some outputs' float32 weights. Shapes: weight (n, K)."""

    @abstractmethod
    def _create_linear(
        self, shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype
    ) -> nn.Module: ...


class Int8Scheme(Scheme):
    """Symmetric, one scale per output channel."""

    name = "int8"
    _row_dims = {"integers": 0, "scale": 0}  # noqa: RUF012 - never changed

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """N * K integers and N scales."""
        return shape[0] * shape[1] + shape[0] * dtype.itemsize

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return True

    def _quantize_rows(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Rounded to 255 steps."""
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        scale = scale.to(dtype).clamp(min=torch.finfo(dtype).tiny)
        integers = (weight / scale.float()[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return {"integers": integers, "scale": scale}

    def _create_linear(
        self, shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype
    ) -> nn.Module:
        return Int8Linear(shape, bias, dtype)


class Int4Scheme(Scheme):
    """Asymmetric, a scale and a zero per output channel and group of 64 (or 32) inputs."""

    name = "int4"
    _row_dims = {"pairs": 0, "scale_zero": 1}  # noqa: RUF012 - never changed

    def num_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        """N * K half bytes, and a scale and a zero for each group."""
        num_groups = shape[1] // (choose_group_size(shape[1]) or shape[1])
        return shape[0] * shape[1] // 2 + 2 * num_groups * shape[0] * dtype.itemsize

    def _fits(self, shape: tuple[int, ...]) -> bool:
        return choose_group_size(shape[1]) is not None

    def _quantize_rows(self, weight: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """Rounded to 16 steps."""
        num_outputs, num_inputs = weight.shape
        groups = weight.view(num_outputs, -1, choose_group_size(num_inputs) or num_inputs)
        low, high = groups.amin(dim=2), groups.amax(dim=2)
        scale = ((high - low) / 15).clamp(min=torch.finfo(dtype).tiny).to(dtype)
        zero = (low + 8 * scale.float()).to(dtype)  # what the integer 8 stands for
        integers = (groups - zero.float()[..., None]) / scale.float()[..., None]
        pairs = pack_pairs(integers.round_().add_(8).clamp_(0, 15).to(torch.uint8))
        return {"pairs": pairs, "scale_zero": torch.stack([scale.t(), zero.t()], 2).contiguous()}

    def _create_linear(
        self, shape: tuple[int, int], bias: Tensor | None, dtype: torch.dtype
    ) -> nn.Module:
        return Int4Linear(shape, bias, dtype)


SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (Int8Scheme(), Int4Scheme())}
