"""Placeholders for quantized layers while transformers creates a model; the integers replace them afterwards.

This avoids dequantizing the whole model. A placeholder ("stand-in") is a matrix of random numbers whose rows overlap in
memory, so that probes can compute with it. The layer that received a placeholder is found by the numbers, not by its
name. A placeholder that transformers merged or split is reported as lost, and its layer is dequantized.

Shape letters: K inputs, N outputs.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

_STEP = 3  # offset between the starts of rows
_NUM_KEYS = 8

Key = tuple[tuple[int, int], tuple[float, ...]]


def make_stand_in(shape: tuple[int, int], number: int) -> Tensor:
    """A matrix that differs for each number, with values exact in every dtype. Shapes: returns bfloat16 (N, K)."""
    num_outputs, num_inputs = shape
    count = (num_outputs - 1) * _STEP + num_inputs
    generator = torch.Generator().manual_seed(number)
    values = torch.randint(-127, 128, (count,), generator=generator)
    # a typical scale of weights that bfloat16 represents exactly
    scale = 2.0 ** -(7 + math.ceil(math.log2(num_inputs) / 2))
    return (values * scale).bfloat16().as_strided(shape, (_STEP, 1))


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a weight; a stand-in keeps its overlapping rows. Shapes: any, unchanged."""
    if weight.dtype == dtype or weight.untyped_storage().nbytes() >= weight.nbytes:
        return weight
    count = weight.untyped_storage().nbytes() // weight.itemsize
    values = weight.as_strided((count,), (1,)).to(dtype)
    return values.as_strided(weight.shape, weight.stride())


def find_stand_ins(model: nn.Module, stand_ins: dict[str, Tensor]) -> dict[str, str]:
    """Paths of the linear layers with stand-in weights, by stand-in name. Lost stand-ins are missing."""
    keys: dict[Key, list[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            keys.setdefault(_key(module.weight), []).append(path)
    found = {}
    for name, stand_in in stand_ins.items():
        paths = keys.get(_key(stand_in), [])
        if len(paths) == 1:
            weight: Any = model.get_submodule(paths[0]).weight
            if torch.equal(weight, cast(stand_in, weight.dtype).to(weight.device)):
                found[name] = paths[0]
    return found


def _key(weight: Tensor) -> Key:
    num_outputs, num_inputs = weight.shape
    return (num_outputs, num_inputs), tuple(weight[0, :_NUM_KEYS].float().tolist())
