"""The comparison with other engines: the timed work is really computed."""

import pytest

from benchmarks.peers.hugging_face import HuggingFace
from benchmarks.peers.ours import Ours
from benchmarks.peers.peer import WORKLOADS
from benchmarks.peers.run import run
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


def test_systems_are_measured_and_printed(tiny, capsys):
    run(str(tiny), ["ours:float32"], ["decode-1", "prefill"], 2, 1, is_quick=False)
    assert "ours:float32" in capsys.readouterr().out
