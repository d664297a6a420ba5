"""How a GPU computes steps, on a CPU: buffers padded to batch sizes, fused layers, joined products; kernels by their reference implementations.

Nothing is captured here, but the function that would be runs over the same buffers. `tests/gpu` has the rest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from engines.core.runner import SequenceFailure, StepResult
from engines.core.sequence import Batch, EngineRequest, ScheduledSequence, Sequence
from engines.torch_backend import runner
from engines.torch_backend.graphs import cuda_graph
from engines.torch_backend.graphs.cuda_graph import DecodeGraphs, SamplingKind, batch_sizes
from engines.torch_backend.layers.linear import METHODS
from engines.torch_backend.models.llava import VLMConfig
from shared.protocol import SamplingParams
from tests.engines.torch_backend.ways import WAYS, Tokens, Way, run_batched
from tests.factories_torch import (
    PROMPTS,
    ModelPair,
    make_engine,
    make_model_pair,
    make_request,
    make_requests,
    make_runner,
    make_vlm_config,
    quantize_pair,
)

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7},
    "truncated": {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 7},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {5: 3.0}, "seed": 7},
}
WIDE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
MODELS: dict[str, VLMConfig] = {
    "grouped": make_vlm_config(),
    "biases": make_vlm_config(
        text={
            "attention_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
        }
    ),
    "int8": make_vlm_config(text=WIDE),
    "int4": make_vlm_config(text=WIDE),
    # only some of the widths have groups: some linears stay whole
    "part": make_vlm_config(text={**WIDE, "intermediate_size": 200}),
}
STEPS = {
    SamplingKind.GREEDY: {},
    SamplingKind.RANDOM: SAMPLINGS["seeded"],
    SamplingKind.TRUNCATED: SAMPLINGS["truncated"],
}


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Steps as a GPU's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "runs_graphs", lambda device: True)
        yield


@contextmanager
def on_the_plain_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "runs_graphs", lambda device: False)
        yield


@cache
def pair(name: str) -> ModelPair:
    made = make_model_pair(MODELS[name], std=0.3 if name in ("grouped", "biases") else 0.12)
    scheme = {"int8": "int8", "int4": "int4", "part": "int4"}.get(name)
    return made if scheme is None else quantize_pair(made, METHODS[scheme])


@cache
def expected(name: str, sampling: str) -> Tokens:
    """The plain path's."""
    model = pair(name)
    return run_batched(partial(make_engine, model), make_requests(model, **SAMPLINGS[sampling]))


@pytest.mark.parametrize("way", WAYS)
def test_by_every_way_it_is_the_plain_path_token_for_token(way: Way, on_cpu: None):
    wanted = expected_outside("grouped", "greedy")
    assert way(partial(make_engine, pair("grouped")), make_requests(pair("grouped"))) == wanted


def expected_outside(name: str, sampling: str) -> Tokens:
    with on_the_plain_path():
        return expected(name, sampling)


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *(("grouped", sampling) for sampling in SAMPLINGS if sampling != "greedy"),
        *((name, "seeded") for name in MODELS if name != "grouped"),
    ],
)
def test_every_model_and_sampling_is_the_plain_path(name: str, sampling: str, on_cpu: None):
    wanted = expected_outside(name, sampling)
    model = pair(name)
    start = partial(make_engine, model)
    assert run_batched(start, make_requests(model, **SAMPLINGS[sampling])) == wanted


def test_requests_of_every_kind_share_a_step(on_cpu: None):
    """Sampled as the most demanding of them needs, each by its own parameters."""
    model = pair("grouped")
    wanted = [
        make_request(model.config, name, PROMPTS["one"], max_tokens=16, **sampling)
        for name, sampling in SAMPLINGS.items()
    ]
    with on_the_plain_path():
        plain = run_batched(partial(make_engine, model), wanted)
    for group in (wanted[:3], wanted):
        found = run_batched(partial(make_engine, model), group)
        assert found == {request.request_id: plain[request.request_id] for request in group}


def make_item(name: str, first_block: int, num_tokens: int, **sampling: Any) -> ScheduledSequence:
    sequence = Sequence(
        name,
        [(7 * place) % 89 for place in range(num_tokens)],
        num_tokens,
        SamplingParams(**{"temperature": 0.0, **sampling}),
        num_computed_tokens=num_tokens - 1,
    )
    sequence.block_ids = list(range(first_block, first_block + -(-num_tokens // 4)))
    return ScheduledSequence(sequence, 1)


def spy(patch: pytest.MonkeyPatch) -> list[tuple[int, SamplingKind]]:
    """Sizes of the buffers used, and how their rows were sampled."""
    seen = []
    step = DecodeGraphs.step

    def note(self: Any, buffers: Any, kind: SamplingKind) -> Any:
        seen.append((len(buffers.inputs.slots), kind))
        return step(self, buffers, kind)

    patch.setattr(cuda_graph.DecodeGraphs, "step", note)
    return seen


@pytest.mark.parametrize("kind", SamplingKind)
@pytest.mark.parametrize("num_sequences", [1, 3, 5, 11])
def test_steps_are_padded_to_batch_sizes_and_idle_rows_do_no_harm(
    num_sequences: int, kind: SamplingKind, on_cpu: None, monkeypatch: pytest.MonkeyPatch
):
    seen = spy(monkeypatch)
    made = make_runner(pair("grouped"), max_num_seqs=16)
    torch.manual_seed(0)
    made.kv_pools[0].data.normal_()
    items = [make_item(f"r{i}", 8 * i, 5 + 2 * i, **STEPS[kind]) for i in range(num_sequences)]
    before = made.kv_pools[0].data.clone()
    together = made.run(Batch(items))
    assert seen == [({1: 1, 3: 4, 5: 8, 11: 16}[num_sequences], kind)]
    written = (made.kv_pools[0].data != before).any(-1).any(-1).nonzero()[:, 2:].unique(dim=0)
    slots = {(i.sequence.block_ids[-1], (i.sequence.num_tokens - 1) % 4) for i in items}
    spare = {(256, 0)} if num_sequences > 1 else set()
    assert {tuple(slot) for slot in written.tolist()} == slots | spare
    alone = [made.run(Batch([item])).choices[0] for item in items]
    assert together == StepResult(alone)


@pytest.mark.parametrize(
    ("config", "is_overlapped"), [({}, True), ({"overlap_steps": False}, False)]
)
def test_it_is_overlapped_unless_it_is_switched_off(
    config: dict[str, Any], is_overlapped: bool, on_cpu: None
):
    model = pair("grouped")
    engine = make_engine(model, **config)
    found = run_batched(lambda: engine, make_requests(model, **SAMPLINGS["seeded"]))
    assert found == expected_outside("grouped", "seeded")
    assert (engine.pipeline.num_overlapped > 0) == is_overlapped


@pytest.mark.parametrize("kind", SamplingKind)
def test_a_step_reads_on_the_device_what_the_one_in_flight_samples(
    kind: SamplingKind, on_cpu: None
):
    """Of the same size or a smaller one; described while the one before is under way."""
    for kept in ([0, 1, 2], [2], [0, 2]):
        made = make_runner(pair("grouped"), max_num_seqs=16)
        made.kv_pools[0].data.fill_(0.1)
        items = [make_item(f"r{i}", 8 * i, 6, **STEPS[kind]) for i in range(3)]
        for item in items:
            item.sequence.block_ids.append(item.sequence.block_ids[-1] + 1)
        sequences = [items[place].sequence for place in kept]
        first = made.launch(Batch(items))
        ahead = [ScheduledSequence(items[i].sequence, 1, in_flight_index=i) for i in kept]
        second = made.launch(Batch(ahead))
        sampled = first.wait()
        found = second.wait()
        for place, item in enumerate(items):
            choice = sampled.choices[place]
            assert choice is not None
            item.sequence.token_ids.append(choice.token_id)
            item.sequence.num_computed_tokens += 1
        made.kv_pools[0].data[:, :, [s.block_ids[-1] for s in sequences]] = 0.1
        assert found == made.run(Batch([ScheduledSequence(s, 1) for s in sequences]))


def test_behind_scores_that_are_no_numbers_any_token_is_decoded(on_cpu: None):
    """There is none to embed, and a device must not be asked for it."""
    made = make_runner(pair("grouped"))
    bad = make_item("bad", 8, 6)
    made.kv_pools[0].data.zero_()
    made.kv_pools[0].data[:, 1, 8] = torch.nan
    first = made.launch(Batch([bad]))
    second = made.launch(Batch([ScheduledSequence(bad.sequence, 1, in_flight_index=0)]))
    for step in (first, second):
        with pytest.raises(SequenceFailure):
            step.wait()


@pytest.mark.parametrize("sampling", [{"num_logprobs": 1}, SAMPLINGS["penalised"]])
def test_what_needs_the_host_is_not_followed(sampling: dict[str, Any], on_cpu: None):
    made = make_runner(pair("grouped"))
    made.kv_pools[0].data.fill_(0.1)
    assert made.launch(Batch([make_item("plain", 0, 6)])).can_be_followed
    items = [make_item("plain", 0, 6), make_item("needy", 8, 6, **sampling)]
    assert not made.launch(Batch(items)).can_be_followed


def test_a_prompt_or_an_image_is_not_decoded(on_cpu: None, monkeypatch: pytest.MonkeyPatch):
    seen = spy(monkeypatch)
    model = pair("grouped")
    engine = make_engine(model)
    engine.add(make_request(model.config, "r", PROMPTS["one"], max_tokens=3))
    while engine.has_work():
        engine.step()
    assert seen == [(1, SamplingKind.GREEDY)] * 2


def test_scores_that_are_no_numbers_fail_their_request_alone(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch
):
    made = make_runner(pair("grouped"))
    items = [make_item("good", 0, 6), make_item("bad", 8, 6)]
    made.kv_pools[0].data.zero_()
    made.kv_pools[0].data[:, 1, 8] = torch.nan
    with pytest.raises(SequenceFailure) as failure:
        made.run(Batch(items))
    assert failure.value.request_id == "bad"
    assert made.run(Batch(items[:1])).choices[0] is not None


def test_what_is_switched_off_is_not_used(on_cpu: None, monkeypatch: pytest.MonkeyPatch):
    seen = spy(monkeypatch)
    made = make_runner(pair("grouped"), disabled_ops=("cuda_graph",))
    assert made.run(Batch([make_item("r", 0, 1)])).choices[0] is not None
    assert not seen


def test_warming_up_meets_every_size(on_cpu: None, monkeypatch: pytest.MonkeyPatch):
    seen = spy(monkeypatch)
    make_runner(pair("grouped"), max_num_seqs=5).warm_up()
    assert {size for size, _ in seen} == {1, 2, 4, 5}
    assert {kind for _, kind in seen} == set(SamplingKind)


@pytest.mark.parametrize("error", [RuntimeError, Exception], ids=["driver", "compiler"])
def test_without_graphs_the_rest_still_serves(
    error: type[Exception],
    on_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def fail(*args: Any) -> None:
        raise error("operation not permitted when stream is capturing")

    made = make_runner(pair("grouped"))
    with monkeypatch.context() as patch:
        patch.setattr(DecodeGraphs, "step", fail)
        made.warm_up()
        assert made.run(Batch([make_item("r", 0, 6)])).choices[0] is not None
    assert "not captured" in caplog.text


def test_joined_products_hold_nothing_twice(on_cpu: None):
    for name in ("grouped", "int8", "int4"):
        model = make_model_pair(MODELS[name], seed=5)
        if name != "grouped":
            model = quantize_pair(model, METHODS[name])
        make_runner(model)
        layer = model.ours.language_model.model.layers[0]
        for parts in (
            [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
            [layer.mlp.gate_proj, layer.mlp.up_proj],
        ):
            weight = {"grouped": "weight", "int8": "integers", "int4": "pairs"}[name]
            storages = {getattr(p, weight).untyped_storage().data_ptr() for p in parts}
            assert len(storages) == 1


def test_batch_sizes_leave_few_rows_idle():
    assert batch_sizes(1) == (1,)
    assert batch_sizes(4) == (1, 2, 4)
    assert batch_sizes(20) == (1, 2, 4, 8, 16, 20)


def turn(request: EngineRequest, rows: int) -> EngineRequest:
    """With positions that are different in every row, and leave places out."""
    count = range(len(request.prompt_token_ids))
    return replace(
        request, positions=tuple([place // (row + 2) for place in count] for row in range(rows))
    )


@pytest.mark.parametrize("sections", [(), (2, 1, 1)])
def test_positions_of_a_prompts_own_are_those_of_the_plain_path(
    sections: tuple[int, ...], on_cpu: None
):
    model = make_model_pair(make_vlm_config(text={"rope_sections": sections}))
    wanted = [turn(request, len(sections) or 1) for request in make_requests(model)]
    found = run_batched(partial(make_engine, model), wanted)
    with on_the_plain_path():
        assert found == run_batched(partial(make_engine, model), wanted)
    assert found != run_batched(partial(make_engine, model), make_requests(model))
