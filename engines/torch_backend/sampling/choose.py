"""Samples a token per row. Parameters are tensors.

Called by the sampler, and captured in CUDA graphs: with `is_exact`, nothing here waits for the GPU. A row depends on
its own scores and parameters alone.

Order: temperature; `top_k`, `top_p` (of the tokens that `top_k` keeps) and `min_p` (relative to the best) remove
tokens; the rest is sampled by Gumbel noise. Ties with the last kept token are kept.

Shape letters: B rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.protocol import SamplingParams

# Noise: a pure function of (seed, position, token id), by SplitMix64 (Steele, Lea and Flood 2014).

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
    """Gumbel noise: argmax(log p + noise) has distribution p (Maddison et al. 2014). Shapes: (B,); returns (B, V)."""
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


#: number of best tokens that are sorted first for `top_p`; all are sorted if these do not reach it
NUCLEUS_WIDTH = 256
#: lower temperatures are greedy in effect, and may be 0 in float32
LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class SampleParams:
    keys: Tensor  #: (B,) int64: noise streams
    top_ks: Tensor  #: (B,) int64; without a limit, the size of the vocabulary
    temperatures: Tensor  #: (B,) float32, above 0
    top_ps: Tensor  #: (B,) float32
    min_ps: Tensor  #: (B,) float32

    @classmethod
    def create(
        cls,
        params: list[SamplingParams],
        positions: list[int],
        vocab_size: int,
        device: torch.device,
    ) -> "SampleParams":
        """`positions`: of the tokens to sample, counted from the first output token."""
        rows = [row_of(p, i, vocab_size) for p, i in zip(params, positions, strict=True)]
        columns = list(zip(*rows, strict=True))
        integers, numbers = (torch.tensor(x).to(device) for x in (columns[:2], columns[2:]))
        return cls(*integers, *numbers)


def row_of(
    params: SamplingParams, position: int, vocab_size: int
) -> tuple[int, int, float, float, float]:
    top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
    temperature = max(params.temperature, LEAST_TEMPERATURE)
    key = signed(stream_key(params.seed, position))
    return key, top_k, temperature, min(params.top_p, 1.0), params.min_p


def is_truncated(params: SamplingParams) -> bool:
    """Whether any token may be excluded."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def sample_random(
    scores: Tensor, params: SampleParams, *, truncated: bool, is_exact: bool = False
) -> Tensor:
    """Sample a token per row. Shapes: (B, V); returns (B,).

    `truncated`: whether any row excludes tokens; `is_exact`: always sort complete rows, which CUDA graphs need,
    instead of checking whether a part is enough.
    """
    # shift the best to 0 first, so that a tiny temperature cannot overflow a score
    scores = (scores - scores.amax(-1, keepdim=True)) / params.temperatures.unsqueeze(1)
    if truncated:
        threshold = torch.maximum(
            params.min_ps.log(), _top_threshold(scores, params, is_exact=is_exact)
        )
        scores = scores.masked_fill(scores < threshold.unsqueeze(1), -torch.inf)
    return (scores + gumbel_noise(params.keys, scores.shape[1])).argmax(dim=-1)


def _top_threshold(scores: Tensor, params: SampleParams, *, is_exact: bool) -> Tensor:
    """The score of the last token that `top_k` and `top_p` keep. Shapes: (B, V); returns (B,)."""
    vocab_size = scores.shape[1]
    top_k, top_p = params.top_ks.unsqueeze(1), params.top_ps.unsqueeze(1)
    if is_exact or vocab_size <= NUCLEUS_WIDTH:
        return _threshold_among(scores, vocab_size, top_k, top_p)[0]
    limits = params.top_ks[params.top_ks < vocab_size]
    width = max(NUCLEUS_WIDTH, int(limits.max())) if limits.numel() else NUCLEUS_WIDTH
    threshold, kept = _threshold_among(scores, width, top_k, top_p)
    # a row with `top_p` alone may keep more than the sorted tokens
    if bool((kept[:, -1:] & (top_k > width) & (top_p < 1)).any()):
        return _threshold_among(scores, vocab_size, top_k, top_p)[0]
    return threshold


def _threshold_among(
    scores: Tensor, width: int, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Threshold and the kept of the `width` best. Shapes: (B, V), limits (B, 1); returns (B,) and (B, width)."""
    vocab_size = scores.shape[1]
    ordered = scores.topk(width, dim=-1).values
    kept = torch.arange(width, device=scores.device) < top_k
    total = torch.where(
        top_k < vocab_size,
        ordered.masked_fill(~kept, -torch.inf).logsumexp(-1, keepdim=True),
        scores.logsumexp(-1, keepdim=True),
    )
    mass = (ordered - total).exp().cumsum(-1)
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=-1)
    kept = kept & ((before < top_p) | (top_p >= 1))
    last = (kept.sum(-1, keepdim=True) - 1).clamp(min=0)  # the best token is kept, even for top_p 0
    untruncated = (top_k >= vocab_size) & (top_p >= 1)
    return ordered.gather(1, last).masked_fill(untruncated, -torch.inf).squeeze(1), kept
