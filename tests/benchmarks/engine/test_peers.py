"""The comparison with peers: what is timed is computed, and slices of it add up."""

import json
from contextlib import nullcontext

import pytest

from benchmarks.peers import run as comparison
from benchmarks.peers.fleet import Fleet
from benchmarks.peers.hugging_face import HuggingFace
from benchmarks.peers.ours import Ours
from benchmarks.peers.peer import WORKLOADS
from benchmarks.peers.results import Result, Results
from benchmarks.peers.run import Comparison, PeerOptions, run
from tests.engines.torch_backend.models.family_table import named, write_checkpoint

ABOUT: dict[str, str | int] = {"model": "tiny", "threads": 2}


def make_result(system: str, workload: str, *values: float) -> Result:
    return Result(system, workload, WORKLOADS[workload].unit, list(values), 0.1)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=str)
def test_our_engine_and_transformers_answer_every_workload(tiny, workload):
    ours = Ours(tiny, "float32", 1, max_batch_size=16)
    theirs = HuggingFace(tiny, "float32", 1)
    for peer in (ours, theirs):
        seconds = getattr(peer, workload.task)(**workload.arguments)
        assert workload.value(seconds, 48) > 0


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "SmolVLM"])
def test_models_of_transformers_answer_with_their_own_images_and_positions(name, tmp_path):
    family = named(name)
    write_checkpoint(family, tmp_path)
    ours = Ours(tmp_path, "float32", 1, max_batch_size=4)
    theirs = HuggingFace(tmp_path, "float32", 1)
    for workload in ("first-token", "repeat", "decode-4", "prefill", "image"):
        for peer in (ours, theirs):
            asked = WORKLOADS[workload]
            assert getattr(peer, asked.task)(**asked.arguments) > 0
    assert ours.engine.stats().num_prefix_hit_tokens > 0


def test_our_batches_decode_behind_contexts_of_their_own(tiny, monkeypatch):
    ours = Ours(tiny, "float32", 1, max_batch_size=4)
    seen = []
    compute = ours.runner.launch

    def look(batch):
        seen.append(
            [(item.sequence.num_computed_tokens, item.num_new_tokens) for item in batch.items]
        )
        blocks = [block for item in batch.items for block in item.sequence.block_ids]
        assert len(set(blocks)) == len(blocks)
        return compute(batch)

    monkeypatch.setattr(ours.runner, "launch", look)
    ours.decode(batch_size=4, num_steps=2)
    assert seen == [[(length, 1)] * 4 for length in (47, 48, 49)]


def test_a_repeated_image_is_found_and_a_new_one_is_not(tiny):
    ours = Ours(tiny, "float32", 1, max_batch_size=1)
    ours.first_token()
    ours.first_token()
    stats = ours.engine.stats()
    assert (stats.num_prefix_hit_tokens, stats.num_encoder_hits) == (0, 0)
    ours.repeat()
    assert ours.engine.stats().num_prefix_hit_tokens == 32


def test_a_run_that_is_cut_gives_what_is_known_and_every_turn_is_told(
    tiny, tmp_path, monkeypatch, capsys
):
    workloads = ("decode-1", "prefill")
    options = PeerOptions(tiny, ("ours:float32",), workloads, rounds=2, folder=tmp_path)
    ask, seen = Fleet.ask, []

    def cut(self, system, workload):
        if workload.name == "prefill" and len(seen) == 1:
            raise KeyboardInterrupt
        if workload.name == "prefill":
            seen.append(system)
        return ask(self, system, workload)

    monkeypatch.setattr(Fleet, "ask", cut)
    run(options, as_json=True)
    shown = capsys.readouterr()
    known = json.loads(shown.out)["results"]
    counts = {(row["system"], row["workload"]): len(row["values"]) for row in known}
    assert counts == {
        ("ours:float32", "decode-1"): 2,
        ("ours:float32", "prefill"): 1,
    }
    first, *lines = shown.err.splitlines()
    assert "2 workloads (decode-1, prefill), 2 rounds" in first
    assert sum("round" in line for line in lines) == 3


def test_ratios_are_speeds_over_the_best_of_the_others():
    results = Results(ABOUT)
    results.add(
        [
            make_result("ours:bfloat16", "decode-1", 20.0),
            make_result("ours:bfloat16", "image", 100.0),
            make_result("transformers:float32", "decode-1", 4.0),
            make_result("transformers:bfloat16", "decode-1", 5.0, 10.0, 15.0),
            make_result("transformers:float32", "image", 300.0),
            make_result("transformers:bfloat16", "image", 250.0),
            make_result("llama.cpp:BF16", "image", 50.0),
            make_result("llama.cpp:Q8_0", "decode-1", 1.0),
        ]
    )
    assert results.compare(["decode-1", "image"]) == [
        ("ours bfloat16 : transformers' best", [2.0, 2.5]),
        ("ours bfloat16 : llama.cpp BF16", [None, 0.5]),
    ]


@pytest.mark.parametrize(
    ("name", "workload", "reason"),
    [("SmolVLM", "image", "towers .* --workloads decode-1"), ("Qwen3-VL", "decode-1", "decoders")],
)
def test_llama_cpp_is_no_peer_of_families_whose_files_nobody_writes(
    name, workload, reason, tmp_path
):
    family = named(name)
    write_checkpoint(family, tmp_path)
    with pytest.raises(SystemExit, match=f"{reason}.*leave it out of --systems"):
        run(PeerOptions(tmp_path, ("llama.cpp:BF16",), (workload,)), as_json=True)


def test_llama_cpp_decodes_beside_families_whose_decoder_it_has(tmp_path):
    family = named("Qwen2.5-VL")
    write_checkpoint(family, tmp_path)
    Comparison(PeerOptions(tmp_path, ("llama.cpp:BF16",), ("decode-1", "prefill")))


@pytest.fixture
def held(monkeypatch):
    """The systems that were in memory together; they answer without being there."""
    seen = []

    class Loaded(nullcontext):
        def __init__(self, systems, *_):
            seen.append([str(system) for system in systems])
            super().__init__(self)

        def ask(self, system, workload):
            return 1.0

    monkeypatch.setattr(comparison, "Fleet", Loaded)
    return seen


@pytest.mark.parametrize("one_by_one", [False, True])
def test_systems_may_be_held_one_after_another(one_by_one, tiny, tmp_path, held, capsys):
    systems = ["ours:float32", "transformers:float32"]
    options = PeerOptions(
        tiny, tuple(systems), ("prefill",), folder=tmp_path, one_by_one=one_by_one
    )
    run(options, as_json=True)
    assert held == ([systems[:1], systems[1:]] if one_by_one else [systems])
    assert len(json.loads(capsys.readouterr().out)["results"]) == 2


def test_a_wrong_workload_ends_with_the_reason(tiny):
    with pytest.raises(SystemExit, match="bench peers: workloads are decode-1"):
        run(PeerOptions(tiny, ("ours:float32",), ("sleep",)), as_json=True)
