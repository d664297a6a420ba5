"""The GPU's code path for steps, on a CPU: buffers padded to batch sizes, fused layers and joined linear layers.

Kernels are replaced by their reference implementations. Nothing is captured; the function that a GPU would capture
runs on the same buffers. `tests/gpu` runs the capture.
"""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from engines.core.runner import SequenceFailure, StepResult
from engines.core.sequence import Batch, EngineRequest, ScheduledSequence, Sequence
from engines.torch_backend import runner
from engines.torch_backend.graphs import DecodeGraphs, SamplingKind
from engines.torch_backend.layers.linear import METHODS
from shared.protocol import SamplingParams
from tests.engines.torch_backend.paged import in_sections
from tests.engines.torch_backend.test_equivalence import SAMPLINGS, model_pair, requests
from tests.engines.torch_backend.ways import WAYS, Tokens, Way, run_batched
from tests.factories_torch import (
    PROMPTS,
    ModelPair,
    make_engine,
    make_model_pair,
    make_request,
    make_runner,
    make_vlm_config,
)

KINDS = {
    "greedy": SamplingKind.GREEDY,
    "seeded": SamplingKind.RANDOM,
    "truncated": SamplingKind.TRUNCATED,
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enables the GPU's code path on the CPU."""
    monkeypatch.setattr(runner, "runs_graphs", lambda device: True)


@cache
def expected(sampling: str, name: str = "grouped", weights: str = "full") -> Tokens:
    """Returns the tokens of the plain path."""
    model = model_pair(name, weights)
    return run_plainly(model, requests(model, **SAMPLINGS[sampling]))


def run_plainly(model: ModelPair, wanted: list[EngineRequest]) -> Tokens:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "runs_graphs", lambda device: False)
        return run_batched(partial(make_engine, model), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_tokens_of_the_plain_path(way: Way):
    model = model_pair("grouped")
    assert way(partial(make_engine, model), requests(model)) == expected("greedy")


@pytest.mark.parametrize(
    ("sampling", "name", "weights"),
    [
        *((sampling, "grouped", "full") for sampling in SAMPLINGS if sampling != "greedy"),
        ("seeded", "biases", "full"),
        ("seeded", "tied", "full"),
        *(("seeded", "wide", scheme) for scheme in METHODS),
    ],
)
def test_every_model_and_sampling_equals_the_plain_path(sampling: str, name: str, weights: str):
    """Steps are overlapped if nothing needs the host."""
    model = model_pair(name, weights)
    engine = make_engine(model)
    found = run_batched(lambda: engine, requests(model, **SAMPLINGS[sampling]))
    assert found == expected(sampling, name, weights)
    assert (engine.pipeline.num_overlapped > 0) == (sampling not in ("penalised", "held"))


def test_requests_of_every_kind_share_a_step():
    """The step uses the sampling kind of the most demanding request; each request keeps its own parameters."""
    model = model_pair("grouped")
    wanted = [
        make_request(model.config, name, PROMPTS["one"], max_tokens=16, **sampling)
        for name, sampling in SAMPLINGS.items()
        if name != "held"
    ]
    plain = run_plainly(model, wanted)
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
    """Records the size of each step's buffers and its sampling kind."""
    seen = []
    step = DecodeGraphs.step

    def note(self: Any, buffers: Any, kind: SamplingKind) -> Any:
        seen.append((len(buffers.inputs.slots), kind))
        return step(self, buffers, kind)

    patch.setattr(DecodeGraphs, "step", note)
    return seen


@pytest.mark.parametrize(
    ("num_sequences", "size", "kind"),
    [
        (1, 1, "greedy"), (3, 4, "seeded"), (5, 8, "truncated"), (11, 16, "greedy"),
        (3, 4, "truncated"), (11, 16, "seeded"),
    ],
)  # fmt: skip
def test_steps_are_padded_to_batch_sizes_and_idle_rows_have_no_effect(
    num_sequences: int, size: int, kind: str, monkeypatch: pytest.MonkeyPatch
):
    seen = spy(monkeypatch)
    made = make_runner(model_pair("grouped"), max_num_seqs=16)
    torch.manual_seed(0)
    made.kv_pools[0].data.normal_()
    items = [make_item(f"r{i}", 8 * i, 5 + 2 * i, **SAMPLINGS[kind]) for i in range(num_sequences)]
    before = made.kv_pools[0].data.clone()
    together = made.launch(Batch(items)).wait()
    assert seen == [(size, KINDS[kind])]
    written = (made.kv_pools[0].data != before).any(-1).any(-1).nonzero()[:, 2:].unique(dim=0)
    slots = {(i.sequence.block_ids[-1], (i.sequence.num_tokens - 1) % 4) for i in items}
    spare = {(256, 0)} if num_sequences > 1 else set()
    assert {tuple(slot) for slot in written.tolist()} == slots | spare
    alone = [made.launch(Batch([item])).wait().choices[0] for item in items]
    assert together == StepResult(alone)


def test_overlapping_and_graphs_can_be_switched_off(monkeypatch: pytest.MonkeyPatch):
    model, seen = model_pair("grouped"), spy(monkeypatch)
    for config in ({"overlap_steps": False}, {"disabled_ops": ("cuda_graph",)}):
        engine = make_engine(model, **config)
        found = run_batched(lambda engine=engine: engine, requests(model))
        assert found == expected("greedy")
        assert engine.pipeline.num_overlapped == 0
        assert bool(seen) == ("overlap_steps" in config)
        seen.clear()


@pytest.mark.parametrize("kind", ["greedy", "seeded", "truncated"])
def test_a_step_reads_the_sampled_tokens_of_the_one_in_flight_on_the_device(kind: str):
    """The next step has the same size or a smaller one, and is prepared while the previous one is in flight."""
    for kept in ([0, 1, 2], [2], [0, 2]):
        made = make_runner(model_pair("grouped"), max_num_seqs=16)
        made.kv_pools[0].data.fill_(0.1)
        items = [make_item(f"r{i}", 8 * i, 6, **SAMPLINGS[kind]) for i in range(3)]
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
        assert found == made.launch(Batch([ScheduledSequence(s, 1) for s in sequences])).wait()


def test_nan_logits_fail_only_their_request():
    made = make_runner(model_pair("grouped"))
    good, bad = make_item("good", 0, 6), make_item("bad", 8, 6)
    made.kv_pools[0].data.zero_()
    made.kv_pools[0].data[:, 1, 8] = torch.nan
    with pytest.raises(SequenceFailure) as failure:
        made.launch(Batch([good, bad])).wait()
    assert failure.value.request_id == "bad"
    assert made.launch(Batch([good])).wait().choices[0] is not None
    # The next step has no token to embed, and must not read it from the device.
    first = made.launch(Batch([bad]))
    second = made.launch(Batch([ScheduledSequence(bad.sequence, 1, in_flight_index=0)]))
    for step in (first, second):
        with pytest.raises(SequenceFailure):
            step.wait()


def test_warming_up_runs_every_size(monkeypatch: pytest.MonkeyPatch):
    seen = spy(monkeypatch)
    make_runner(model_pair("grouped"), max_num_seqs=5).warm_up()
    assert {size for size, _ in seen} == {1, 2, 4, 5}
    assert {kind for _, kind in seen} == set(SamplingKind)


def test_steps_run_if_graphs_cannot_be_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*args: Any) -> None:
        raise Exception("operation not permitted when stream is capturing")

    made = make_runner(model_pair("grouped"))
    monkeypatch.setattr(DecodeGraphs, "step", fail)
    made.warm_up()
    assert made.launch(Batch([make_item("r", 0, 6)])).wait().choices[0] is not None
    assert "not captured" in caplog.text


@pytest.mark.parametrize(
    ("weights", "weight"), [("full", "weight"), ("int8", "integers"), ("int4", "pairs")]
)
def test_joined_layers_share_one_storage(weights: str, weight: str):
    model = model_pair("wide", weights)
    make_runner(model)
    layer = model.ours.language_model.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    for parts in (
        [attention.q_proj, attention.k_proj, attention.v_proj],
        [mlp.gate_proj, mlp.up_proj],
    ):
        storages = {getattr(p, weight).untyped_storage().data_ptr() for p in parts}
        assert len(storages) == 1


@pytest.mark.parametrize("sections", [(), (2, 1, 1)])
def test_a_prompts_own_positions_give_the_tokens_of_the_plain_path(
    sections: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    """The positions differ between rows and have gaps."""
    model = make_model_pair(make_vlm_config())
    usual, plain = requests(model), model.ours.rotary
    if sections:
        monkeypatch.setattr(model.ours, "rotary", lambda *how: in_sections(plain(*how), sections))
    wanted = [
        replace(
            request,
            positions=tuple(
                [place // (row + 2) for place in range(len(request.prompt_token_ids))]
                for row in range(len(sections) or 1)
            ),
        )
        for request in usual
    ]
    found = run_batched(partial(make_engine, model), wanted)
    assert found == run_plainly(model, wanted)
    assert found != run_batched(partial(make_engine, model), usual)
