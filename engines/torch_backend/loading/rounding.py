"""Weights rounded to the nearest integers, as checkpoints keep them: one scale an output, or a scale and a zero a group.

Used by `vlm quantize`. Shape letters: K inputs, N outputs, G groups of inputs.
"""

import torch
from torch import Tensor

from engines.torch_backend.layers.quantization import SCHEMES
from engines.torch_backend.loading.formats.reader import Integers

_CHUNK_WEIGHTS = 1 << 18  # rounded at once: what is computed on the way stays small


def round_int8(weight: Tensor, dtype: torch.dtype) -> Integers:
    """As `--quantization int8` does. Scales are numbers of `dtype`. Shapes: weight (N, K)."""
    parts = SCHEMES["int8"].quantize(weight, dtype)
    values = parts["integers"].view(torch.uint8) ^ 128
    return Integers(values, 8, weight.shape[1], parts["scale"].float()[None], None)


def round_int4(weight: Tensor, dtype: torch.dtype, size: int) -> Integers:
    """In groups of a size whose zero is one of the 16 integers. Scales are numbers of `dtype`. Shapes: weight (N, K)."""
    num_rows = max(1, _CHUNK_WEIGHTS // weight.shape[1])
    chunks = [_round_rows(rows.float(), size, dtype) for rows in weight.split(num_rows)]
    values, scale, zero = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return Integers(values, 4, size, scale.t().contiguous(), zero.t().contiguous())


def choose_scale_and_zero(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What spans the weights of each group. Shapes: groups (..., K / G); returns float32 (...) each."""
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).to(dtype).clamp(min=torch.finfo(dtype).tiny).float()
    return scale, (-low / scale).round_().clamp_(0, 15)


def _round_rows(
    weight: Tensor, group_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    groups = weight.view(len(weight), -1, group_size)
    scale, zero = choose_scale_and_zero(groups, dtype)
    values = (groups / scale[..., None]).round_().add_(zero[..., None]).clamp_(0, 15)
    return values.to(torch.uint8).flatten(1), scale, zero
