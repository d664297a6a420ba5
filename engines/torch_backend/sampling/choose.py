"""Samples a token per row. Parameters are tensors.

Called by the sampler, and captured in CUDA graphs: with `is_exact`, nothing here reads a number on the host. A row
depends on its own scores and parameters alone.

Order: temperature; `top_k`, `top_p` (of the tokens that `top_k` keeps) and `min_p` (relative to the best) remove
tokens; the rest is sampled by Gumbel noise. Ties with the last kept token are kept.

Shape letters: B rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.torch_backend.sampling.noise import gumbel_noise, signed, stream_key
from shared.protocol import SamplingParams

#: number of best tokens that are sorted first for `top_p`; all are sorted if these do not reach it
NUCLEUS_WIDTH = 256
#: lower temperatures are greedy in effect, and may be 0 in float32
LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class SampleParams:
    keys: Tensor  #: (B,) int64: noise streams
    top_ks: Tensor  #: (B,) int64; the size of the vocabulary without a limit
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
        integers = torch.tensor(
            [[signed(stream_key(p.seed, i)) for p, i in zip(params, positions, strict=True)],
             [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]]
        ).to(device)  # fmt: skip
        numbers = torch.tensor(
            [
                [max(p.temperature, LEAST_TEMPERATURE) for p in params],
                [min(p.top_p, 1.0) for p in params],
                [p.min_p for p in params],
            ]
        ).to(device)
        return cls(*integers, *numbers)


def is_truncated(params: SamplingParams) -> bool:
    """Whether any token may be excluded."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def sample_random(
    scores: Tensor, params: SampleParams, *, truncated: bool, is_exact: bool = False
) -> Tensor:
    """Sample a token per row. Shapes: (B, V); returns (B,).

    `truncated`: whether any row excludes tokens; `is_exact`: sort complete rows instead of checking whether a part
    is enough.
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
    """The threshold among the `width` best tokens, and which of these are kept.

    Shapes: scores (B, V), limits (B, 1); returns (B,) and (B, width).
    """
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
