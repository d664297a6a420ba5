"""Vision tower and projector over C++ kernels: the same maps as `PlainBlock`, their reference implementation.

Made by the runner from a loaded model, whose weights it shares. The stream between blocks is float32 whatever the
weights are. Norms are torch's: they are few of a image's milliseconds.

Shape letters: B images, t tokens of each, C channels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engines.torch_backend.models.encoding_run import VisionOps
from engines.torch_backend.models.registry import FamilyModel
from engines.torch_backend.models.vision import mix_values
from engines.torch_backend.ops.cpu.full_attention import can_mix, mix_by_kernel
from engines.torch_backend.ops.cpu.fused_linear import FusedLinear
from engines.torch_backend.ops.cpu.kernels import CpuKernels


class CpuBlock:
    """A block of the tower. `dtype` is the engine's: of torch's products, and of attention."""

    def __init__(self, kernels: CpuKernels, block: Any, dtype: torch.dtype) -> None:
        attention, mlp = block.attn, block.mlp
        self._mixer = kernels.library if kernels.has_full_attention else None
        self._norms = [_Norm(block.ln_1), _Norm(block.ln_2)]
        self._dtype = dtype
        self._in = FusedLinear(kernels, [attention.in_proj], dtype)
        self._out = FusedLinear(kernels, [attention.out_proj], dtype)
        self._widen = FusedLinear(kernels, [mlp.c_fc], dtype)
        self._narrow = FusedLinear(kernels, [mlp.c_proj], dtype, activation=mlp.gelu.function)

    def project(self, x: Tensor) -> Tensor:
        """Norm; queries, keys and values."""
        return _by_token(self._in, self._norms[0](x.float())).to(self._dtype)

    def mix(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of some queries to everything."""
        if self._mixer is None or not can_mix(queries):
            return mix_values(queries, keys, values)
        return mix_by_kernel(self._mixer, queries, keys, values)

    def add_mixed(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The stream with what attention gave."""
        return _by_token(self._out, mixed.float()).add_(x)

    def add_feed(self, x: Tensor) -> Tensor:
        """The stream after the feed-forward part."""
        wide = _by_token(self._widen, self._norms[1](x))
        return _by_token(self._narrow, wide).add_(x)


class _Norm:
    """A layer norm in float32."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        self._shape, self._eps = norm.normalized_shape, norm.eps
        self._weight, self._bias = norm.weight.float(), norm.bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


class CpuProjector:
    """`Projector`, its reference implementation, over kernels."""

    def __init__(self, kernels: CpuKernels, projector: Any, dtype: torch.dtype) -> None:
        self._first = FusedLinear(kernels, [projector.linear_1], dtype)
        activation = projector.activation
        self._second = FusedLinear(kernels, [projector.linear_2], dtype, activation=activation)

    def __call__(self, features: Tensor) -> Tensor:
        """Shapes: (B, t, layers * vision width); returns (B, t, decoder width)."""
        return _by_token(self._second, _by_token(self._first, features))


def cpu_ops(model: FamilyModel, kernels: CpuKernels, dtype: torch.dtype) -> VisionOps:
    """What images go through with kernels."""
    tower = model.vision_tower
    blocks = [CpuBlock(kernels, block, dtype) for _, block in tower.blocks]
    return VisionOps(tower, blocks, CpuProjector(kernels, model.multi_modal_projector, dtype))


def _by_token(linear: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Images' tokens one after another. Shapes: (B, t, K); returns (B, t, N)."""
    return linear(x.flatten(0, 1)).unflatten(0, x.shape[:2])
