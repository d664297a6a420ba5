"""Logprobs of prompt tokens equal those of transformers, by every way to compute the prompt."""

from collections.abc import Iterable

import pytest
import torch

from engines.core.engine import BatchingEngine
from engines.core.sequence import EngineRequest
from engines.torch_backend import runner
from shared.protocol import PromptLogprob
from tests.factories_torch import (
    ModelPair,
    make_engine,
    make_model_pair,
    make_request,
    make_vlm_config,
)

CONFIG = make_vlm_config()
EOS = 2
PROMPT: list[list[int] | int] = [[5, 6, EOS, 7], 1, [8, 9, EOS, 10, 11, *range(20, 40)]]


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    return make_model_pair(CONFIG)


def scored(name: str, parts: list[list[int] | int] = PROMPT, **wishes: object) -> EngineRequest:
    return make_request(
        CONFIG, name, parts, **{"num_prompt_logprobs": 3, "max_tokens": 1, **wishes}
    )


def run(
    engine: BatchingEngine, requests: Iterable[EngineRequest]
) -> dict[str, list[PromptLogprob]]:
    """Returns the prompt logprobs of each request; none is reported twice."""
    found: dict[str, list[PromptLogprob]] = {}
    for request in requests:
        engine.add(request)
        found[request.request_id] = []
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            found[output.request_id] += output.prompt_logprobs
    return found


def check(pair: ModelPair, request: EngineRequest, found: list[PromptLogprob]) -> None:
    """Checks that values, ranks and best tokens equal those of transformers."""
    token_ids = request.prompt_token_ids
    pixels = [image.pixels for image in request.images]
    with torch.inference_mode():
        logits = pair.theirs(
            input_ids=torch.tensor([token_ids]),
            pixel_values=torch.stack(pixels) if pixels else None,
        ).logits[0]
    logprobs = logits.log_softmax(-1)
    assert [(each.position, each.token_id) for each in found] == [*enumerate(token_ids)]
    assert found[0].rank == 0
    assert found[0].top == ()
    for each, row in zip(found[1:], logprobs, strict=False):
        value = row[each.token_id]
        assert each.chosen.logprob == pytest.approx(value.item(), abs=2e-4)
        assert each.rank == int((row > value).sum()) + 1
        best = row.topk(3)
        assert [token_id for token_id, _ in each.top] == best.indices.tolist()
        values = [rival.logprob for _, rival in each.top]
        assert values == pytest.approx(best.values.tolist(), abs=2e-4)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="at once"),
        pytest.param({"max_num_batched_tokens": 5}, id="in chunks"),
        pytest.param({"num_kv_blocks": 18, "enable_prefix_cache": False}, id="preempted"),
        pytest.param({"num_kv_blocks": 20, "max_num_batched_tokens": 5}, id="preempted in chunks"),
        pytest.param({"overlap_steps": True}, id="overlapped"),
    ],
)
def test_prompt_logprobs_equal_those_of_transformers_beside_others(pair, changes):
    engine = make_engine(pair, **changes)
    requests = [
        scored("a", max_tokens=12),
        make_request(CONFIG, "plain", PROMPT, max_tokens=20),
        scored("b", [[EOS, 3, 4, 5], 2, [6, 7]], max_tokens=30),
        scored("again", max_tokens=9),
    ]
    found = run(engine, requests)
    assert found["plain"] == []
    for name in ("a", "b", "again"):
        check(pair, next(r for r in requests if r.request_id == name), found[name])
    if "num_kv_blocks" in changes:
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("has_graphs", [False, True])
def test_a_prompt_of_one_token_reports_it_without_a_logprob(pair, monkeypatch, has_graphs):
    monkeypatch.setattr(runner, "runs_graphs", lambda device: has_graphs)
    request = scored("one", [[7]], max_tokens=4)
    check(pair, request, run(make_engine(pair, overlap_steps=True), [request])["one"])


def test_a_cached_prompt_is_computed_again_for_its_logprobs(pair):
    engine = make_engine(pair)
    run(engine, [make_request(CONFIG, "first", PROMPT, max_tokens=2)])
    for max_tokens in (0, 1):
        request = scored(f"n{max_tokens}", max_tokens=max_tokens)
        check(pair, request, run(engine, [request])[request.request_id])
    later = make_request(CONFIG, "later", PROMPT, max_tokens=2)
    hits = engine.stats().num_prefix_hit_tokens
    run(engine, [later])
    assert engine.stats().num_prefix_hit_tokens > hits


def test_an_attempt_after_the_first_token_does_not_report_them_again(pair):
    told = run(make_engine(pair), [scored("r", max_tokens=4, output_token_ids=(5,))])
    assert told == {"r": []}


def test_a_long_prompt_is_scored_in_several_steps(pair):
    engine = make_engine(pair, num_kv_blocks=512, max_num_batched_tokens=2048)
    long: list[list[int] | int] = [[3 + place % 40 for place in range(240)]]
    requests = [scored("a", long), scored("b", [*long, [9]]), scored("c", [[7], *long])]
    found = run(engine, requests)
    assert engine.stats().num_steps == 2  # limited by memory; 2048 tokens would fit
    for request in requests:
        check(pair, request, found[request.request_id])
