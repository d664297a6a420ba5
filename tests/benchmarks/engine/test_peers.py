"""The comparison with peers: what is timed is computed, and slices of it add up."""

import json

import pytest

from benchmarks.peers.fleet import Fleet
from benchmarks.peers.hugging_face import HuggingFace
from benchmarks.peers.ours import Ours
from benchmarks.peers.peer import WORKLOADS
from benchmarks.peers.results import Result, Results
from benchmarks.peers.run import PeerOptions, run
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


def test_models_of_transformers_answer_with_their_own_images_and_positions(tmp_path):
    write_checkpoint(named("Qwen2.5-VL"), tmp_path)
    ours = Ours(tmp_path, "float32", 1, max_batch_size=4)
    theirs = HuggingFace(tmp_path, "float32", 1)
    for workload in ("first-token", "repeat", "decode-4", "prefill", "image"):
        for peer in (ours, theirs):
            asked = WORKLOADS[workload]
            assert getattr(peer, asked.task)(**asked.arguments) > 0
    assert ours.engine.stats().num_prefix_hit_tokens > 0


def test_a_repeated_image_is_found_and_a_new_one_is_not(tiny):
    ours = Ours(tiny, "float32", 1, max_batch_size=1)
    ours.first_token()
    ours.first_token()
    stats = ours.engine.stats()
    assert (stats.num_prefix_hit_tokens, stats.num_encoder_hits) == (0, 0)
    ours.repeat()
    assert ours.engine.stats().num_prefix_hit_tokens == 32


def test_a_run_that_is_cut_gives_what_is_known(tiny, tmp_path, monkeypatch, capsys):
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
    known = json.loads(capsys.readouterr().out)["results"]
    counts = {(row["system"], row["workload"]): len(row["values"]) for row in known}
    assert counts == {
        ("ours:float32", "decode-1"): 2,
        ("ours:float32", "prefill"): 1,
    }


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
