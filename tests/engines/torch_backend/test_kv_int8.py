"""8-bit keys and values: half of the bytes, one answer by every way, and logits within a stated tolerance."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from engines.core.request import EngineRequest
from engines.core.runner import TokenChoice
from engines.core.sequence import Sequence
from engines.torch_backend import runner
from engines.torch_backend.kv_cache import KVCachePool, bytes_per_block, plan_kv_cache, quantize
from engines.torch_backend.settings import TorchSettings
from tests.engines.torch_backend.paged import CPU, make_pool
from tests.engines.torch_backend.ways import WAYS, Tokens, Way, run_alone, run_batched
from tests.factories_torch import (
    ModelPair,
    make_engine,
    make_model_pair,
    make_requests,
    make_text_config,
    make_vlm_config,
)

TEXT = make_text_config()
#: Error of the logits over their size, on average and at most: random weights, 2 layers, head width 32.
MEAN_TOLERANCE, WORST_TOLERANCE = 0.02, 0.06


@cache
def model() -> ModelPair:
    text = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    return make_model_pair(make_vlm_config(text=text), std=0.12)


def requests(**sampling: Any) -> list[EngineRequest]:
    return make_requests(model(), **sampling)


def test_it_takes_about_half_of_bfloat16_and_counts_its_scales():
    wide = make_text_config(head_dim=128)
    pool = KVCachePool(wide, 10, 16, torch.bfloat16, CPU, "int8")
    assert pool.num_bytes == 10 * bytes_per_block(wide, 16, torch.int8)
    assert pool.num_bytes < 0.52 * 10 * bytes_per_block(wide, 16, torch.bfloat16)


def test_more_tokens_fit_the_same_bytes():
    text = make_text_config(head_dim=128)
    plans = [
        plan_kv_cache(
            text,
            TorchSettings(kv_cache_bytes=1 << 20, kv_dtype=kv_dtype),
            torch.bfloat16,
            1 << 40,
            "cpu",
            [text],
        )
        for kv_dtype in ("auto", "int8")
    ]
    assert plans[1].num_blocks > 1.9 * plans[0].num_blocks


def test_a_number_is_off_by_half_a_step_at_most():
    x = torch.randn(5, 3, 16) * torch.tensor([1e-6, 1.0, 1e4])[:, None]
    integers, scale = quantize(x)
    assert integers.abs().max() == 127
    assert ((integers * scale[..., None] - x).abs() <= 0.5001 * scale[..., None]).all()


def test_zeros_stay_zeros():
    integers, scale = quantize(torch.zeros(2, 1, 8))
    assert not (integers * scale[..., None]).any()


def test_what_is_read_is_what_writing_said():
    pool = make_pool(kv_dtype="int8")
    key, value = torch.randn(2, 8, 2, 8).unbind()
    stored = pool.write(1, torch.arange(8), key, value)
    assert_close([x[0] for x in pool.read(1, torch.arange(8)[None])], list(stored), rtol=0, atol=0)
    assert_close(stored, (key, value), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seed"])
@pytest.mark.parametrize("way", [way for way in WAYS if way is not run_alone])
def test_the_same_tokens_come_out_by_every_way(way: Way, sampling: dict[str, Any]):
    assert way(partial(make_engine, model(), kv_dtype="int8"), requests(**sampling)) == alone(
        tuple(sampling.items())
    )


@cache
def alone(sampling: tuple[tuple[str, Any], ...]) -> Tokens:
    return run_alone(partial(make_engine, model(), kv_dtype="int8"), requests(**dict(sampling)))


def test_logits_stay_within_the_tolerance(monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, list[torch.Tensor]] = {"auto": [], "int8": []}
    for kv_dtype, logits in seen.items():

        def note(
            scores: torch.Tensor, sequences: list[Sequence], positions: list[int], logits=logits
        ):
            logits += scores.float()
            return [TokenChoice((7 * position) % 89) for position in positions]

        monkeypatch.setattr(runner, "sample", note)
        run_batched(partial(make_engine, model(), kv_dtype=kv_dtype), requests())
    exact, rounded = (torch.stack(logits) for logits in seen.values())
    errors = (rounded - exact).norm(dim=1) / exact.norm(dim=1)
    assert 0 < errors.mean() < MEAN_TOLERANCE
    assert errors.max() < WORST_TOLERANCE
