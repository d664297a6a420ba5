"""Tokens follow the distribution of the parameters and depend only on seed and position.

The chi-square tests sample with fixed seeds, so their result never changes; a correct sampler exceeds their bound once
in 10,000 sets of seeds.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from engines.core.runner import SequenceFailure
from engines.core.sequence import Sequence
from engines.torch_backend.sampling import (
    LEAST_LOGPROB,
    NUCLEUS_WIDTH,
    SampleParams,
    TokenCounts,
    random_bits,
    sample,
    sample_random,
    signed,
    stream_key,
)
from shared.protocol import SamplingParams

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
NUM_SAMPLES = 4000


def make_sequence(
    output: tuple[int, ...] = (), prompt: tuple[int, ...] = (0,), **sampling: Any
) -> Sequence:
    params = SamplingParams(**{"temperature": 1.0, **sampling})
    return Sequence("request", [*prompt, *output], len(prompt), params)


def sample_many(logits: torch.Tensor, **sampling: Any) -> list[int]:
    """Draws many samples from one distribution, each with its own seed."""
    sequences = [make_sequence(seed=seed, **sampling) for seed in range(NUM_SAMPLES)]
    return [choice.token_id for choice in sample(logits.repeat(NUM_SAMPLES, 1), sequences)]


def chi_square_bound(freedom: int) -> float:
    """Returns the bound that is exceeded with probability 1e-4. Source: Wilson and Hilferty 1931."""
    shrink = 2 / (9 * freedom)
    return freedom * (1 - shrink + 3.719 * math.sqrt(shrink)) ** 3


def assert_distribution(tokens: list[int], expected: torch.Tensor) -> None:
    counts = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a token was sampled that must not be"
    wanted = expected[possible].double() * len(tokens)
    statistic = ((counts[possible] - wanted) ** 2 / wanted).sum().item()
    assert statistic < chi_square_bound(max(1, int(possible.sum()) - 1))


def kept(token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Returns the softmax over only these tokens."""
    scores = torch.full_like(LOGITS, -torch.inf)
    scores[token_ids] = LOGITS[token_ids] / temperature
    return scores.softmax(-1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_end_is_not_sampled_before_min_tokens(temperature):
    """Other sequences of the step can end."""
    sequences = [
        Sequence(
            "r", [0, *output], 1,
            SamplingParams(temperature=temperature, seed=seed, min_tokens=least),
            eos_token_ids=(0, 900) if least else (),
        )
        for output, least in (((), 2), ((5,), 2), ((5, 5), 2), ((), 0))
        for seed in range(400)
    ]  # fmt: skip
    tokens = [c.token_id for c in sample(LOGITS.repeat(len(sequences), 1), sequences)]
    ended = [0 in tokens[start : start + 400] for start in range(0, 1600, 400)]
    assert ended == [False, False, True, True]


def adjusted(changes: dict[int, float], temperature: float = 1.0) -> torch.Tensor:
    """Returns the softmax after some scores are replaced."""
    scores = LOGITS.clone()
    for token_id, score in changes.items():
        scores[token_id] = score
    return (scores / temperature).softmax(-1)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, kept(list(range(8)))),
        ({"temperature": 0.5}, kept(list(range(8)), 0.5)),
        ({"temperature": 3.0}, kept(list(range(8)), 3.0)),
        ({"top_k": 3}, kept([0, 1, 2])),
        ({"top_k": 100}, kept(list(range(8)))),
        # probabilities: .395 .240 .145 .088 .054 .032 .020 .003 (sum of the first three: .78)
        ({"top_p": 0.7}, kept([0, 1, 2])),
        ({"top_p": 0.39}, kept([0])),
        ({"top_p": 0.0}, kept([0])),
        ({"min_p": 0.3}, kept([0, 1, 2])),  # limit 2 + log 0.3 = 0.796
        ({"top_k": 4, "top_p": 0.6}, kept([0, 1])),  # of these: .455 .276 .167 .102
        ({"top_k": 4, "min_p": 0.5, "temperature": 2.0}, kept([0, 1, 2], 2.0)),
        ({"logit_bias": {7: 100.0}}, kept([7])),
        ({"logit_bias": {3: 1.2, 0: -1.0}}, adjusted({3: 1.7, 0: 1.0})),
        # the output is 0 0 1, the prompt is 5 5
        ({"frequency_penalty": 0.7}, adjusted({0: 0.6, 1: 0.8})),
        ({"presence_penalty": 0.7}, adjusted({0: 1.3, 1: 0.8})),
        ({"frequency_penalty": -0.5}, adjusted({0: 3.0, 1: 2.0})),
        ({"repetition_penalty": 2.0}, adjusted({0: 1.0, 1: 0.75, 5: -1.0})),
        # penalties apply before the limits, so other tokens are the best two
        ({"frequency_penalty": 2.0, "top_k": 2}, kept([2, 3])),
        (
            {
                "repetition_penalty": 2.0,
                "frequency_penalty": 0.2,
                "presence_penalty": 0.1,
                "logit_bias": {1: 0.5},
                "temperature": 0.7,
            },
            adjusted({0: 0.5, 1: 0.7, 5: -1.0}, 0.7),
        ),
    ],
    ids=str,
)
def test_samples_follow_the_distribution(sampling, expected):
    assert_distribution(sample_many(LOGITS, prompt=(5, 5), output=(0, 0, 1), **sampling), expected)


@pytest.mark.parametrize("seed", range(5))
def test_penalties_follow_a_sequence_that_grows_and_shrinks(seed):
    """Compared with counting all tokens, while drafts are sampled and removed, with new and repeated tokens."""
    random = Random(seed)
    sequence = make_sequence(
        prompt=tuple(random.choices(range(30), k=random.randrange(1, 40))),
        output=tuple(random.choices(range(30), k=random.randrange(4))),
        repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.3, temperature=0.0,
    )  # fmt: skip
    logits = torch.randn(20, 40, generator=torch.Generator().manual_seed(seed))
    for _ in range(150):
        num_lost = random.randrange(min(4, sequence.num_output_tokens + 1))
        del sequence.token_ids[sequence.num_tokens - num_lost :]
        sequence.token_ids += random.choices(range(40), k=random.randrange(4))
        counts = Counter(sequence.token_ids[sequence.num_prompt_tokens :])
        expected = logits.clone()
        for token_id in set(sequence.token_ids):
            score, count = logits[:, token_id], counts[token_id]
            score = torch.where(score < 0, score * 1.3, score / 1.3)
            expected[:, token_id] = score - 0.4 * count + 0.3 * (count > 0)
        found = sample(logits, [sequence] * len(logits))
        assert [choice.token_id for choice in found] == expected.argmax(-1).tolist()


def test_a_token_with_penalties_costs_less_than_counting_a_long_sequence():
    sequence = make_sequence(prompt=tuple(range(100_000)), repetition_penalty=1.1)
    counts = TokenCounts(sequence)

    def seconds(work: Callable[[], object]) -> float:
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    def follow() -> None:
        sequence.token_ids.append(5)
        counts.follow(sequence)

    follow_s = min(seconds(follow) for _ in range(20))
    assert follow_s < 0.1 * min(seconds(lambda: TokenCounts(sequence)) for _ in range(5))


def test_a_nucleus_wider_than_the_first_candidates_is_complete():
    flat = torch.zeros(4 * NUCLEUS_WIDTH)
    flat[: 2 * NUCLEUS_WIDTH] += 5.0
    # 0.9 of the mass needs most of the higher half, whose tokens tie, so all of them are kept
    tokens = sample_many(flat, top_p=0.9)
    assert NUCLEUS_WIDTH < max(tokens) < 2 * NUCLEUS_WIDTH


def test_ties_at_the_limit_are_kept_and_greedy_ignores_the_limits():
    tied = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert set(sample_many(tied, top_k=2)) == {0, 1, 2, 3}
    assert set(sample_many(LOGITS * 1000, temperature=1e-30)) == {0}
    greedy = make_sequence(temperature=0.0, top_k=5, top_p=0.1, min_p=0.5)
    assert sample(LOGITS.view(1, -1), [greedy])[0].token_id == 0


@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_k": 5}, {"top_p": 0.8}, {"frequency_penalty": 1.0, "logit_bias": {3: 1.0}}],
    ids=str,
)
def test_a_token_does_not_depend_on_other_sequences_of_the_step(sampling):
    torch.manual_seed(0)
    logits = torch.randn(5, 3000)
    mine = make_sequence(output=(3, 3, 9), seed=42, **sampling)
    others = [
        make_sequence(temperature=0.0),
        make_sequence(seed=1, top_k=700, top_p=0.99),
        make_sequence(output=(1, 2), seed=2, repetition_penalty=1.5),
        make_sequence(seed=42, logit_bias={9: 50.0}),
    ]
    alone = sample(logits[:1], [mine])[0].token_id
    for place in range(5):
        company = [*others[:place], mine, *others[place:]]
        rows = [*range(1, place + 1), 0, *range(place + 1, 5)]
        assert sample(logits[rows], company)[place].token_id == alone


def test_logprobs_on_request_are_those_of_the_unmodified_distribution():
    expected = LOGITS.log_softmax(-1)
    penalised = {"temperature": 0.3, "top_k": 1, "output": (0,), "presence_penalty": 5.0}
    sequences = [make_sequence(num_logprobs=n, **penalised) for n in (None, 0, 3, 20)]
    without, alone, choice, most = sample(LOGITS.repeat(4, 1), sequences)
    assert (without.logprob, alone.top_logprobs, len(most.top_logprobs)) == (None, (), 8)
    assert choice.token_id == 1
    assert alone.logprob == choice.logprob == pytest.approx(expected[1].item())
    assert [token_id for token_id, _ in choice.top_logprobs] == [0, 1, 2]
    assert [value for _, value in choice.top_logprobs] == pytest.approx(expected[:3].tolist())


def test_the_logprob_of_an_impossible_token_is_finite():
    """JSON has no infinity, so such an event could be encoded but not decoded."""
    logits = LOGITS.clone()
    logits[1:] = -torch.inf
    logits[7] = -20_000.0
    [choice] = sample(logits.view(1, -1), [make_sequence(temperature=0, num_logprobs=8)])
    assert choice.logprob == 0.0
    values = [value for _, value in choice.top_logprobs]
    assert values == [0.0, *[LEAST_LOGPROB] * 7]
    assert choice.top_logprobs[1][0] == 7  # ordered by the unclipped values


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_scores_fail_their_request(value):
    logits = LOGITS.repeat(2, 1)
    logits[1, 3] = value
    sequences = [make_sequence(), make_sequence()]
    sequences[1].request_id = "broken"
    with pytest.raises(SequenceFailure) as failure:
        sample(logits, sequences)
    assert failure.value.request_id == "broken"


def splitmix64(state: int, count: int) -> list[int]:
    """Returns the outputs of the published reference generator."""
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) % 2**64
        outputs.append(mixed ^ (mixed >> 31))
    return outputs


def test_the_generator_is_splitmix64():
    keys = [0, 1, 2**63, stream_key(-5, 1000), stream_key(2**80, 0)]
    bits = random_bits(torch.tensor([signed(key) for key in keys]), 50)
    unsigned = [[value % 2**64 for value in row] for row in bits.tolist()]
    assert unsigned == [splitmix64(key, 50) for key in keys]
    # the published first output for state 0
    assert unsigned[0][0] == 0xE220A8397B1DCDAF


VOCAB_SIZE = 5 * NUCLEUS_WIDTH
PARAMS = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=5, seed=2),
    SamplingParams(temperature=1.3, top_p=0.8, seed=3),
    SamplingParams(temperature=1.0, top_k=600, top_p=0.9, min_p=0.01, seed=4),
    SamplingParams(temperature=2.0, min_p=0.2, seed=5),
    SamplingParams(temperature=1.0, top_p=0.0, seed=6),
]


def sample_rows(rows: list[int], scores: torch.Tensor, position: int, **how: bool) -> list[int]:
    params = SampleParams.create(
        [PARAMS[row] for row in rows], [position] * len(rows), VOCAB_SIZE, scores.device
    )
    return sample_random(scores[rows], params, truncated=True, **how).tolist()


def test_a_full_sort_samples_the_same_tokens_as_a_partial_one():
    rows = list(range(len(PARAMS)))
    for position in range(20):
        torch.manual_seed(position)
        scores = 3 * torch.randn(len(rows), VOCAB_SIZE)
        whole = sample_rows(rows, scores, position, is_exact=True)
        assert whole == sample_rows(rows, scores, position)
        assert whole == [sample_rows([row], scores, position, is_exact=True)[0] for row in rows]
