"""Samples the next tokens from the logits of a step.

A row's token is a pure function of its logits, its request's sampling parameters and earlier tokens, its seed and
its output position; it does not depend on the batch.

Order: logit bias, repetition penalty, frequency and presence penalty, no end token before `min_tokens`,
`allowed_token_ids`, the grammar's mask, temperature; then `top_k`, `top_p` (of the tokens that `top_k` keeps) and
`min_p` (relative to the best) remove tokens; Gumbel noise selects one of the rest. Ties with the last kept token are
kept. Log probabilities are computed from the model's logits before these changes, as OpenAI reports them.

CUDA graphs capture `sample_random` too. With `is_exact`, it never waits for the GPU, as a capture requires.

Shape letters: B rows, V vocabulary.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.core.runner import PromptScore, SequenceFailure, TokenChoice, token_mask
from engines.core.sequence import ScheduledSequence, Sequence
from shared.protocol import SamplingParams

#: OpenAI's value for very unlikely tokens; also replaces minus infinity, which JSON cannot express
LEAST_LOGPROB = -9999.0
_SCORED_ROWS = 64  #: rows that are converted to float32 at a time
NOT_FINITE = "The model's scores for the next token are not finite numbers."


def sample(
    logits: Tensor, sequences: list[Sequence], positions: list[int] | None = None
) -> list[TokenChoice]:
    """The next token of each row. Shapes: logits (B, V). Raises: SequenceFailure for logits that are not finite.

    `positions`: output positions of the tokens; required if the sequences lack some earlier tokens.
    """
    if positions is None:
        positions = [sequence.num_output_tokens for sequence in sequences]
    logits = logits.float()
    scores = _adjust(logits, sequences, positions)
    best, token_ids = scores.max(dim=-1)
    for is_finite, sequence in zip(best.isfinite().tolist(), sequences, strict=True):
        if not is_finite:
            raise SequenceFailure(sequence.request_id, NOT_FINITE)
    sampled = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature > 0]
    if sampled:
        rows = torch.tensor(sampled, device=logits.device)
        params = [sequences[row].sampling for row in sampled]
        places = [positions[row] for row in sampled]
        how = SampleParams.create(params, places, scores.shape[1], scores.device)
        is_any_truncated = any(map(is_truncated, params))
        token_ids[rows] = sample_random(scores[rows], how, truncated=is_any_truncated)
    choices = [TokenChoice(token_id) for token_id in token_ids.tolist()]
    _add_logprobs(choices, logits, sequences)
    return choices


def _adjust(logits: Tensor, sequences: list[Sequence], positions: list[int]) -> Tensor:
    """Logits after all adjustments; `logits` itself if no sequence needs one. Shapes: (B, V); returns (B, V)."""
    scores = logits
    for is_asked, adjust in _ADJUSTMENTS:
        rows = [row for row, each in enumerate(sequences) if is_asked(each, positions[row])]
        if rows:
            scores = adjust(scores if scores is not logits else logits.clone(), sequences, rows)
    return scores


def _allow_only(scores: Tensor, sequences: list[Sequence], rows: list[int]) -> Tensor:
    for row in rows:
        allowed = torch.tensor(sequences[row].sampling.allowed_token_ids, device=scores.device)
        kept = scores[row, allowed]
        scores[row] = -torch.inf
        scores[row, allowed] = kept
    return scores


def _forbid_end(scores: Tensor, sequences: list[Sequence], rows: list[int]) -> Tensor:
    for row in rows:
        ends = [each for each in sequences[row].eos_token_ids if each < scores.shape[1]]
        scores[row, ends] = -torch.inf
    return scores


#: (256, 8): True for each bit that is 0 in a byte's value, the lowest bit first.
_FORBIDDEN = ~torch.from_numpy(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(bool)
)


def _apply_masks(scores: Tensor, sequences: list[Sequence], rows: list[int]) -> Tensor:
    """Mask the tokens that the rows' grammars exclude. Shapes: (B, V); returns (B, V). Raises: SequenceFailure."""
    masks = b"".join([token_mask(sequences[row]) for row in rows])
    values = torch.frombuffer(bytearray(masks), dtype=torch.uint8).to(scores.device)
    forbidden = _FORBIDDEN.to(scores.device)[values.long()].view(len(rows), -1)
    forbidden = forbidden[:, : scores.shape[1]]
    if len(rows) == len(scores):
        return scores.masked_fill_(forbidden, -torch.inf)
    scores[rows] = scores[rows].masked_fill(forbidden, -torch.inf)
    return scores


def _add_bias(scores: Tensor, sequences: list[Sequence], rows: list[int]) -> Tensor:
    for row in rows:
        bias = sequences[row].sampling.logit_bias
        scores[row, list(bias)] += torch.tensor(list(bias.values()), device=scores.device)
    return scores


def needs_host(sequence: Sequence) -> bool:
    """Whether sampling needs the host, because it adjusts logits or returns log probabilities."""
    is_adjusted = any(is_asked(sequence, 0) for is_asked, _ in _ADJUSTMENTS)
    return is_adjusted or sequence.sampling.num_logprobs is not None


def _has_penalty(sampling: SamplingParams) -> bool:
    """Whether earlier tokens change the scores."""
    given = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
    return given != (1.0, 0.0, 0.0)


def _penalise(scores: Tensor, sequences: list[Sequence], rows: list[int]) -> Tensor:
    """Apply penalties; repetition (Keskar et al. 2019) counts prompt and output, frequency and presence only output."""
    parts = []
    for sequence in (sequences[row] for row in rows):
        if sequence.token_counts is None:
            sequence.token_counts = TokenCounts(sequence)
        parts.append(sequence.token_counts.follow(sequence))
    token_ids, factors, amounts = (
        torch.from_numpy(np.concatenate(column)).to(scores.device)
        for column in zip(*parts, strict=True)
    )
    row_ids = np.repeat(rows, [len(part[0]) for part in parts])
    row_ids = torch.from_numpy(row_ids).to(scores.device)
    old = scores[row_ids, token_ids]
    scores[row_ids, token_ids] = torch.where(old < 0, old * factors, old / factors) - amounts
    return scores


#: In order of application: a predicate of sequence and output position, and a function that changes scores in place.
_ADJUSTMENTS: tuple[tuple[Callable[[Sequence, int], Any], Callable[..., Tensor]], ...] = (
    (lambda sequence, _: sequence.sampling.logit_bias, _add_bias),
    (lambda sequence, _: _has_penalty(sequence.sampling), _penalise),
    (lambda sequence, position: position < sequence.sampling.min_tokens, _forbid_end),
    (lambda sequence, _: sequence.sampling.allowed_token_ids, _allow_only),
    (lambda sequence, _: sequence.constraint is not None, _apply_masks),
)


def _add_logprobs(choices: list[TokenChoice], logits: Tensor, sequences: list[Sequence]) -> None:
    """Add log probabilities to the choices of requests that ask for them."""
    asked = {
        row: sequence.sampling.num_logprobs
        for row, sequence in enumerate(sequences)
        if sequence.sampling.num_logprobs is not None
    }
    if not asked:
        return
    chosen = [choices[row].token_id for row in asked]
    found = _logprobs(logits[list(asked)], chosen, max(asked.values()))
    for (row, count), logprob, top in zip(asked.items(), *found, strict=True):
        choices[row].logprob, choices[row].top_logprobs = logprob, top[:count]


def _logprobs(
    scores: Tensor, token_ids: list[int], count: int
) -> tuple[list[float], list[tuple[tuple[int, float], ...]]]:
    """For each row: its token's log probability; its `count` most likely tokens with theirs. Shapes: scores (B, V)."""
    totals = scores.logsumexp(-1, keepdim=True)
    values = scores.gather(1, torch.tensor(token_ids, device=scores.device).unsqueeze(1))
    top = scores.topk(min(count, scores.shape[1]), dim=-1)
    logprobs, top_logprobs = (
        (x - totals).clamp_(min=LEAST_LOGPROB).tolist() for x in (values, top.values)
    )
    pairs = zip(top.indices.tolist(), top_logprobs, strict=True)
    return [x for [x] in logprobs], [tuple(zip(*pair, strict=True)) for pair in pairs]


def score_prompts(logits: Tensor, items: list[ScheduledSequence]) -> dict[str, list[PromptScore]]:
    """The log probabilities of `scored` prompt tokens. Shapes: logits (B, V), no row for a prompt's first token.

    Raises: SequenceFailure for logits that are not finite.
    """
    scores: dict[str, list[PromptScore]] = {}
    begin = 0
    for item in items:
        if not (positions := item.scored):
            continue
        found = [PromptScore(0)] if positions[0] == 0 else []
        later = positions[len(found) :]
        for index in range(0, len(later), _SCORED_ROWS):
            part = later[index : index + _SCORED_ROWS]
            found += _score_rows(logits[begin : begin + len(part)], item.sequence, part)
            begin += len(part)
        scores[item.sequence.request_id] = found
    return scores


def _score_rows(logits: Tensor, sequence: Sequence, positions: range) -> list[PromptScore]:
    """Shapes: logits (positions, V)."""
    scores = logits.float()
    if not scores.amax(-1).isfinite().all():
        raise SequenceFailure(sequence.request_id, NOT_FINITE)
    token_ids = sequence.token_ids[positions.start : positions.stop]
    found = _logprobs(scores, token_ids, sequence.sampling.num_prompt_logprobs or 0)
    own = scores.gather(1, torch.tensor(token_ids, device=scores.device).unsqueeze(1))
    ranks = ((scores > own).sum(-1) + 1).tolist()
    return [
        PromptScore(position, logprob, rank, top)
        for position, rank, logprob, top in zip(positions, ranks, *found, strict=True)
    ]


_TAIL = 64  #: number of last tokens to compare; a step removes fewer


class TokenCounts:
    """Distinct tokens of one sequence, and their counts.

    A step updates only the tokens added or removed at the end. A removed token keeps its row, with no-op values.
    """

    def __init__(self, sequence: Sequence) -> None:
        self._sampling = sequence.sampling
        self._num_prompt_tokens = sequence.num_prompt_tokens
        self._noted = list(sequence.token_ids)
        totals, outputs = Counter(self._noted), Counter(self._noted[self._num_prompt_tokens :])
        self._rows = {token_id: row for row, token_id in enumerate(totals)}
        self._ids, self._totals = array("q", totals), array("q", totals.values())
        self._outputs = array("q", [outputs[token_id] for token_id in totals])

    def follow(self, sequence: Sequence) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Update the counts. Returns token ids, divisors of their scores, amounts to subtract. Shapes: (distinct,)."""
        token_ids, noted = sequence.token_ids, self._noted
        while noted[-_TAIL:] != token_ids[max(0, len(noted) - _TAIL) : len(noted)]:
            token_id = noted.pop()
            self._count(token_id, len(noted), -1)
        for token_id in token_ids[len(noted) :]:
            self._count(token_id, len(noted), 1)
            noted.append(token_id)
        ids, totals, outputs = map(np.array, (self._ids, self._totals, self._outputs))
        sampling = self._sampling
        factors = np.where(totals > 0, sampling.repetition_penalty, 1.0)
        amounts = sampling.frequency_penalty * outputs + sampling.presence_penalty * (outputs > 0)
        return ids, factors.astype(np.float32), amounts.astype(np.float32)

    def _count(self, token_id: int, position: int, change: int) -> None:
        row = self._rows.setdefault(token_id, len(self._rows))
        if row == len(self._ids):
            self._ids.append(token_id)
            self._totals.append(0)
            self._outputs.append(0)
        self._totals[row] += change
        if position >= self._num_prompt_tokens:
            self._outputs[row] += change


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

    Int64 wraps as uint64 does; only right shifts must mask the copies of the sign bit. Shapes: keys (B,), int64 from
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


#: number of best tokens that are sorted first for `top_p`; all tokens are sorted if these are not enough
NUCLEUS_WIDTH = 256
#: lower temperatures are greedy in effect, and can round to 0 in float32
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
        """`positions`: output positions of the tokens to sample; 0 is the first output token."""
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
    """Whether `top_k`, `top_p` or `min_p` can exclude tokens."""
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def sample_random(
    scores: Tensor, params: SampleParams, *, truncated: bool, is_exact: bool = False
) -> Tensor:
    """Sample a token per row. Shapes: (B, V); returns (B,).

    `truncated`: whether any row excludes tokens. `is_exact`: always sort complete rows, as CUDA graphs require,
    instead of the `NUCLEUS_WIDTH` best tokens first.
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
    # a row with `top_p` alone can keep more than the sorted tokens
    if bool((kept[:, -1:] & (top_k > width) & (top_p < 1)).any()):
        return _threshold_among(scores, vocab_size, top_k, top_p)[0]
    return threshold


def _threshold_among(
    scores: Tensor, width: int, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Score threshold; which of the `width` best are kept. Shapes: (B, V), limits (B, 1); returns (B,), (B, width)."""
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
