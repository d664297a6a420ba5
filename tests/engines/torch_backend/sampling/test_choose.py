"""A whole sort samples what a look at the best tokens samples, and a row does not see its neighbours."""

import torch

from engines.torch_backend.sampling.choose import NUCLEUS_WIDTH, SampleParams, sample_random
from shared.protocol import SamplingParams

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


def test_a_whole_sort_samples_what_a_part_samples():
    rows = list(range(len(PARAMS)))
    for position in range(20):
        torch.manual_seed(position)
        scores = 3 * torch.randn(len(rows), VOCAB_SIZE)
        whole = sample_rows(rows, scores, position, is_exact=True)
        assert whole == sample_rows(rows, scores, position)


def test_a_row_is_sampled_alike_in_any_company():
    scores = torch.randn(len(PARAMS), VOCAB_SIZE)
    rows = list(range(len(PARAMS)))
    alone = [sample_rows([row], scores, 3, is_exact=True)[0] for row in rows]
    assert sample_rows(rows, scores, 3, is_exact=True) == alone
