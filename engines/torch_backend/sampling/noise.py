"""Stateless random numbers: a pure function of (seed, position, token id).

A sampled token is therefore the same in any batch, at any time. Source: SplitMix64, Steele, Lea and Flood 2014,
whose n-th output needs no earlier one.

Shape letters: B rows, V vocabulary.
"""

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def stream_key(seed: int, position: int) -> int:
    """The 64-bit state of the noise at an output position. Any seed is valid."""
    return _mix((_mix((seed + _GAMMA) & _MASK) + position * _GAMMA) & _MASK)


def _mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * _FIRST) & _MASK
    state = ((state ^ (state >> 27)) * _SECOND) & _MASK
    return state ^ (state >> 31)


def random_bits(keys: Tensor, num_tokens: int) -> Tensor:
    """The first `num_tokens` outputs of each stream: 64 random bits as int64.

    Int64 wraps as uint64 does; only right shifts must mask the copies of the sign bit. Shapes: keys (B,), int64 by
    `signed`; returns (B, V).
    """
    token_ids = torch.arange(1, num_tokens + 1, device=keys.device)
    state = keys.unsqueeze(1) + token_ids * signed(_GAMMA)
    state = (state ^ _shift(state, 30)) * signed(_FIRST)
    state = (state ^ _shift(state, 27)) * signed(_SECOND)
    return state ^ _shift(state, 31)


def gumbel_noise(keys: Tensor, num_tokens: int) -> Tensor:
    """Standard Gumbel noise, float32: argmax(log p + noise) is distributed as p. Shapes: (B,); returns (B, V).

    Source: Gumbel 1954; Maddison et al. 2014.
    """
    upper_half = _shift(random_bits(keys, num_tokens), 32)
    # below 1: otherwise the logarithm is infinite and the token can never be sampled
    uniform = ((upper_half + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def _shift(state: Tensor, bits: int) -> Tensor:
    """Unsigned right shift."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - (1 << 64) if value >> 63 else value
