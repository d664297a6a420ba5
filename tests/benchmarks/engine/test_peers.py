"""The comparison with peers: what is timed is computed, and slices of it add up."""

import pytest

from benchmarks.peers.fleet import Peer
from benchmarks.peers.hugging_face import HuggingFace
from benchmarks.peers.ours import Ours
from benchmarks.peers.peer import WORKLOADS
from benchmarks.peers.results import Results, compare
from benchmarks.peers.run import Comparison
from tests.engines.torch_backend.models.family_table import named, write_checkpoint


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=str)
def test_our_engine_and_transformers_answer_every_workload(tiny, workload):
    ours = Ours(tiny, "float32", 1, max_batch_size=16)
    theirs = HuggingFace(tiny, "float32", 1)
    for peer in (ours, theirs):
        seconds = getattr(peer, workload.task)(**workload.arguments)
        assert workload.value(seconds, 48) > 0


def test_models_of_transformers_answer_with_their_own_images_and_positions(tmp_path):
    write_checkpoint(named("Qwen2.5-VL"), tmp_path)
    ours = Ours(tmp_path, "float32", 1, max_batch_size=4)
    theirs = HuggingFace(tmp_path, "float32", 1)
    for workload in ("first-token", "decode-4", "prefill", "image"):
        for peer in (ours, theirs):
            asked = WORKLOADS[workload]
            assert getattr(peer, asked.task)(**asked.arguments) > 0


def test_a_new_image_is_not_found_in_a_cache(tiny):
    ours = Ours(tiny, "float32", 1, max_batch_size=1)
    ours.first_token()
    ours.first_token()
    stats = ours.engine.stats()
    assert (stats.num_prefix_hit_tokens, stats.num_encoder_hits) == (0, 0)


def test_a_run_that_is_cut_gives_what_is_known(tiny, monkeypatch):
    ask, seen = Peer.ask, []

    def cut(self, task, **arguments):
        if task == "prefill" and len(seen) == 1:
            raise KeyboardInterrupt
        if task == "prefill":
            seen.append(task)
        return ask(self, task, **arguments)

    monkeypatch.setattr(Peer, "ask", cut)
    comparison = Comparison(str(tiny), ["ours:float32"], ["decode-1", "prefill"], rounds=2)
    with pytest.raises(KeyboardInterrupt):
        comparison.measure()
    counts = {cell: len(values) for cell, values in comparison.results.items()}
    assert counts == {("ours:float32", "decode-1"): 2, ("ours:float32", "prefill"): 1}


def test_ratios_are_speeds_over_the_best_of_the_others():
    results: Results = {
        ("ours:bfloat16", "decode-1"): [20.0],
        ("ours:bfloat16", "image"): [100.0],
        ("transformers:float32", "decode-1"): [4.0],
        ("transformers:bfloat16", "decode-1"): [5.0, 10.0, 15.0],
        ("transformers:float32", "image"): [300.0],
        ("transformers:bfloat16", "image"): [250.0],
        ("llama.cpp:BF16", "image"): [50.0],
        ("llama.cpp:Q8_0", "decode-1"): [1.0],
    }
    assert compare(results, ["decode-1", "image"]) == [
        ("ours bfloat16 : transformers' best", [2.0, 2.5]),
        ("ours bfloat16 : llama.cpp BF16", [None, 0.5]),
    ]
