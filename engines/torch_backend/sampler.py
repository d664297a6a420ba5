"""From the logits of a step to its next tokens.

Used by the runner. The token of a row is a pure function of its logits, its request's sampling parameters and
earlier tokens, its seed and its output position: whoever shares the step changes nothing.

Order: logit bias, repetition penalty, frequency and presence penalty, temperature; then `top_k`, `top_p` (of
what `top_k` left) and `min_p` (against the best) remove tokens; what remains is drawn by Gumbel noise.
Tokens that tie with the last one kept are kept. Log probabilities are those of the model's own distribution,
before any of this, as OpenAI reports them.

Shape letters: B rows, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from engines.base import SequenceFailure
from engines.runner import TokenChoice
from engines.sequence import Sequence
from engines.torch_backend.noise import gumbel_noise, stream_key
from shared.protocol import SamplingParams

#: how many of the best tokens are sorted first for `top_p`; all are, where these do not reach it
NUCLEUS_WIDTH = 256
#: what is colder is greedy for all purposes, and may be 0 in float32
LEAST_TEMPERATURE = 1e-6
#: OpenAI's value for what can hardly come; stands for minus infinity too, which no JSON can tell
LEAST_LOGPROB = -9999.0


def sample(logits: Tensor, sequences: list[Sequence]) -> list[TokenChoice]:
    """The next token of each row. Shapes: logits (B, V). Raises: SequenceFailure for logits that are no numbers."""
    logits = logits.float()
    scores = _adjust(logits, sequences)
    best, token_ids = scores.max(dim=-1)
    _check_finite(best, sequences)
    drawn = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        token_ids[rows] = _draw(scores[rows], [sequences[row] for row in drawn])
    choices = [TokenChoice(token_id) for token_id in token_ids.tolist()]
    _add_logprobs(choices, logits, sequences)
    return choices


def _check_finite(best: Tensor, sequences: list[Sequence]) -> None:
    """A row whose best score is no finite number cannot be drawn from; it is that request's failure."""
    for is_finite, sequence in zip(best.isfinite().tolist(), sequences, strict=True):
        if not is_finite:
            raise SequenceFailure(
                sequence.request_id, "The model's scores for the next token are not finite numbers."
            )


def _adjust(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Scores with bias and penalties; the very logits where no request has any. Shapes: (B, V), kept."""
    scores = logits
    biased = [row for row, sequence in enumerate(sequences) if sequence.sampling.logit_bias]
    if biased:
        scores = _add_bias(scores.clone(), sequences, biased)
    penalised = [row for row, sequence in enumerate(sequences) if _has_penalty(sequence.sampling)]
    if penalised:
        scores = _penalise(scores.clone(), sequences, penalised)
    return scores


def _add_bias(scores: Tensor, sequences: list[Sequence], rows: list[int]) -> Tensor:
    places = [(row, token_id) for row in rows for token_id in sequences[row].sampling.logit_bias]
    bias = [value for row in rows for value in sequences[row].sampling.logit_bias.values()]
    row_index, token_index = torch.tensor(places, device=scores.device).unbind(1)
    scores[row_index, token_index] += torch.tensor(bias, device=scores.device)
    return scores


def _has_penalty(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


def _penalise(scores: Tensor, sequences: list[Sequence], rows: list[int]) -> Tensor:
    """Lower the scores of tokens that were there before.

    Repetition (Keskar et al. 2019) looks at prompt and output; frequency and presence at the output alone.
    """
    parts = [_penalties(sequences[row]) for row in rows]
    token_ids, factors, amounts = (
        torch.from_numpy(np.concatenate(column)).to(scores.device)
        for column in zip(*parts, strict=True)
    )
    row_ids = np.repeat(rows, [len(part[0]) for part in parts])
    row_ids = torch.from_numpy(row_ids).to(scores.device)
    old = scores[row_ids, token_ids]
    scores[row_ids, token_ids] = torch.where(old < 0, old * factors, old / factors) - amounts
    return scores


def _penalties(sequence: Sequence) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct tokens of a sequence, what to divide their scores by, and what to take from them."""
    sampling = sequence.sampling
    token_ids, places = np.unique(np.asarray(sequence.token_ids), return_inverse=True)
    counts = np.bincount(places[sequence.num_prompt_tokens :], minlength=len(token_ids))
    amounts = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    factors = np.full(len(token_ids), sampling.repetition_penalty)
    return token_ids, factors.astype(np.float32), amounts.astype(np.float32)


def _draw(scores: Tensor, sequences: list[Sequence]) -> Tensor:
    """A random token per row. Shapes: (B, V); returns (B,)."""
    params = [sequence.sampling for sequence in sequences]
    temperatures = torch.tensor(
        [max(p.temperature, LEAST_TEMPERATURE) for p in params], device=scores.device
    )
    # first the best becomes 0, so that a tiny temperature cannot push a score beyond all numbers
    scores = (scores - scores.amax(-1, keepdim=True)) / temperatures.unsqueeze(1)
    threshold = _threshold(scores, params)
    if threshold is not None:
        scores = scores.masked_fill(scores < threshold.unsqueeze(1), -torch.inf)
    keys = [stream_key(s.sampling.seed, s.num_output_tokens) for s in sequences]
    return (scores + gumbel_noise(keys, scores.shape[1], scores.device)).argmax(dim=-1)


def _threshold(scores: Tensor, params: list[SamplingParams]) -> Tensor | None:
    """The least score that may be drawn, per row whose best is 0; None if all may. Shapes: (B, V); returns (B,)."""
    threshold = None
    if any(p.min_p > 0 for p in params):
        min_ps = torch.tensor([p.min_p for p in params], device=scores.device)
        threshold = min_ps.log()  # -inf for 0
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        limit = _top_k_top_p_threshold(scores, params)
        threshold = limit if threshold is None else torch.maximum(threshold, limit)
    return threshold


def _top_k_top_p_threshold(scores: Tensor, params: list[SamplingParams]) -> Tensor:
    """The score of the last token that both limits keep. Shapes: (B, V); returns (B,)."""
    vocab_size = scores.shape[1]
    top_ks = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    num_kept = torch.tensor(top_ks, device=scores.device).unsqueeze(1)
    top_p = torch.tensor([min(p.top_p, 1.0) for p in params], device=scores.device).unsqueeze(1)
    limited = [top_k for top_k in top_ks if top_k < vocab_size]
    for width in (max([NUCLEUS_WIDTH, *limited]), vocab_size):
        width = min(width, vocab_size)
        ordered = scores.topk(width, dim=-1).values
        kept = torch.arange(width, device=scores.device) < num_kept
        total = torch.where(
            num_kept < vocab_size,
            ordered.masked_fill(~kept, -torch.inf).logsumexp(-1, keepdim=True),
            scores.logsumexp(-1, keepdim=True),
        )
        mass = (ordered - total).exp().cumsum(-1)
        before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=-1)
        kept &= (before < top_p) | (top_p >= 1)
        if width == vocab_size or not _is_cut_short(kept, num_kept, top_p):
            break
    last = (kept.sum(-1, keepdim=True) - 1).clamp(min=0)  # the best stays, even for top_p 0
    threshold = ordered.gather(1, last).squeeze(1)
    unlimited = (num_kept >= vocab_size) & (top_p >= 1)
    return threshold.masked_fill(unlimited.squeeze(1), -torch.inf)


def _is_cut_short(kept: Tensor, num_kept: Tensor, top_p: Tensor) -> bool:
    """Whether a row that is limited by `top_p` alone would keep more than the tokens looked at."""
    width = kept.shape[1]
    return bool((kept[:, -1:] & (num_kept > width) & (top_p < 1)).any())


def _add_logprobs(choices: list[TokenChoice], logits: Tensor, sequences: list[Sequence]) -> None:
    """Fill in log probabilities where they were asked for."""
    asked = {
        row: sequence.sampling.num_logprobs
        for row, sequence in enumerate(sequences)
        if sequence.sampling.num_logprobs is not None
    }
    if not asked:
        return
    rows = torch.tensor(list(asked), device=logits.device)
    logprobs = logits[rows].log_softmax(-1)
    chosen = torch.tensor([choices[row].token_id for row in asked], device=logits.device)
    chosen_values = logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1).clamp_(min=LEAST_LOGPROB)
    top = logprobs.topk(min(max(asked.values()), logits.shape[1]), dim=-1)
    top_values = top.values.clamp_(min=LEAST_LOGPROB)
    for (row, count), value, ids, values in zip(
        asked.items(),
        chosen_values.tolist(),
        top.indices.tolist(),
        top_values.tolist(),
        strict=True,
    ):
        choices[row].logprob = value
        choices[row].top_logprobs = tuple(zip(ids[:count], values[:count], strict=True))
