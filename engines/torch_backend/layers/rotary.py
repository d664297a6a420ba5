"""Rotary position embedding: frequencies with their scalings, and the rotation itself.

Used by the decoder. Source: Su et al. 2021 (RoFormer), in the half-split form of LLaMA's published weights;
`linear` scaling: Chen et al. 2023 (position interpolation); `llama3`: the Llama 3.1 release; sections: Wang et
al. 2024 (Qwen2-VL's M-RoPE), where time, height and width of a token rotate separate channels.

Shape letters: N tokens, R positions of a token, H heads, D head width.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from engines.torch_backend.models.config import RopeScaling, TextConfig


def inverse_frequencies(config: TextConfig) -> Tensor:
    """Radians per position of each pair of channels. Shapes: (D / 2,), float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling is None:
        return frequencies
    if config.rope_scaling.kind == "linear":
        return frequencies / config.rope_scaling.factor
    return llama3_frequencies(frequencies, config.rope_scaling)


def llama3_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide frequencies of long wavelengths by `factor`, keep frequencies of short ones, interpolate in between."""
    wavelengths = 2 * math.pi / frequencies
    old_length = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept_share = ((old_length / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies


@dataclass(eq=False)
class RotaryTable:
    """Cosines and sines of every position. Not a module, because no checkpoint contains it."""

    cos: Tensor  #: (positions, D)
    #: (positions, D), with the sign of "rotate half", so that a rotation is a roll, a product and a sum
    sin: Tensor
    channel_rows: Tensor | None = None  #: (D,) position row of each channel; None if R is 1
    num_rows: int = 1  #: R, positions of one token
    others: tuple[Self, ...] = ()  #: tables of layers whose `Heads.rope` is 1, 2 and so on

    @classmethod
    def create(
        cls, config: TextConfig, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        angles = torch.outer(torch.arange(max_positions).float(), inverse_frequencies(config))
        cos = torch.cat([angles.cos()] * 2, dim=-1)
        sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)
        return cls(cos.to(dtype).to(device), sin.to(dtype).to(device))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines. Shapes: positions (N,), or (R, N); returns two (N, 1, D)."""
        where: Any = positions
        if self.channel_rows is not None:
            channels = torch.arange(len(self.channel_rows), device=positions.device)
            where = positions[self.channel_rows].T.contiguous(), channels
        return self.cos[where].unsqueeze(1), self.sin[where].unsqueeze(1)

    def at_all(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of all tables. Shapes: positions (N,), or (R, N); returns two (N, tables, D)."""
        if not self.others:
            return self.at(positions)
        cos, sin = zip(*(table.at(positions) for table in (self, *self.others)), strict=True)
        return torch.cat(cos, dim=1), torch.cat(sin, dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of channels by the angle of its position. Shapes: x (N, H, D); cos, sin (N, 1, D)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
