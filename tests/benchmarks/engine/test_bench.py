"""The engine benchmark counts operations correctly and reports every requested cell."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.engine.cost import ModelCost, Work, image_flops
from benchmarks.engine.measure import Run
from benchmarks.engine.report import show_report
from benchmarks.engine.run import Bench, BenchOptions, run
from deploy.capacity import read_figures
from engines.core.sequence import Batch, ScheduledSequence, Sequence
from shared.protocol import SamplingParams
from tests.factories_torch import make_model_pair, make_pixels, make_runner, make_vlm_config


@contextmanager
def count_operations() -> Iterator[FlopCounterMode]:
    """torch cannot count fused attention, but its plain form consists of matrix products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        yield counter


@pytest.mark.parametrize("changes", [{}, {"vision_feature_layers": (-1, -2)}])
def test_operations_of_an_image_equal_those_counted_by_torch(changes):
    pair = make_model_pair(make_vlm_config(**changes))
    with count_operations() as counter, torch.no_grad():
        pair.ours.encode_images(make_pixels(0)[None])
    assert counter.get_total_flops() == image_flops(pair.config)


def test_operations_of_a_decode_step_equal_those_counted_by_torch():
    pair = make_model_pair(make_vlm_config())
    runner = make_runner(pair)
    sequence = Sequence("a", list(range(6)), 6, SamplingParams(temperature=0))
    sequence.block_ids = [0, 1]
    runner.launch(Batch([ScheduledSequence(sequence, 5)])).wait()
    sequence.num_computed_tokens = 5
    batch = Batch([ScheduledSequence(sequence, 1)])
    with count_operations() as counter:
        runner.launch(batch).wait()
    work = ModelCost(pair.ours, torch.float32).step(batch, num_images=0)
    assert counter.get_total_flops() == work.num_flops


def test_bytes_of_a_step_are_weights_and_contexts():
    config = make_vlm_config(text={"tie_word_embeddings": True})
    pair = make_model_pair(config)
    cost = ModelCost(pair.ours, torch.bfloat16)
    decoder = pair.ours.language_model.model
    weights = sum(value.nbytes for value in decoder.layers.state_dict().values())
    head = decoder.embed_tokens.weight.nbytes
    chunk = Sequence("a", [1] * 9, 9, SamplingParams())
    whole = Sequence("b", [1] * 7, 7, SamplingParams())
    per_token = 2 * 2 * 2 * 8 * 2  # keys and values, layers, heads, width, bytes of bfloat16
    first = cost.step(Batch([ScheduledSequence(chunk, 5)]), 0)
    both = cost.step(Batch([ScheduledSequence(chunk, 5), ScheduledSequence(whole, 7)]), 0)
    assert first.num_bytes == weights + 5 * per_token
    assert both.num_bytes == weights + 12 * per_token + head


def test_rates_and_latencies_follow_their_definitions():
    times = {"a": [0.5, 0.75, 1.5], "b": [1.0]}
    steps = [Work(50, 100), Work(10, 300)]  # 0.5 s for bytes, 0.3 s for operations
    run = Run(2.0, times, 20, 1, steps)
    assert run.ttfts == [0.5, 1.0]
    assert run.tpots == [0.5]
    assert run.itls == [0.25, 0.75]
    assert run.rates()["output_tokens_per_s"] == 2.0
    assert run.rates()["total_tokens_per_s"] == 12.0
    assert run.roofline_ratio(100.0, 1000.0) == pytest.approx(0.4)


def test_tokens_of_one_output_have_no_gap():
    together = {"a": [1.0, 1.0, 1.0, 2.0, 2.0, 5.0]}
    assert Run(6.0, together, 1, 0, late_at=3.0).slowdown == 3.0
    assert Run(6.0, together, 1, 0, late_at=3.0).itls == [1.0, 3.0]
    assert Run(9.0, together, 1, 0, late_at=5.0).slowdown == 2.0, "no output since the late prompt"


def test_every_cell_is_measured_and_printed(tiny, capsys):
    options = BenchOptions(str(tiny), batch_sizes=(1, 3), num_tokens=4, rounds=2, device="cpu")
    bench = Bench(options)
    rows = bench.run_all()
    names = ("decode", "prefill", "image", "mixed")
    assert [(row.scenario, row.batch_size) for row in rows] == [*product(names, (1, 3))]
    limits = [10 * bench.machine.bytes_per_s, 10 * bench.machine.flops_per_s]  # not measured idle
    for row in rows:
        for each in row.runs:
            assert 0 < each.roofline_ratio(*limits) < 1
            assert bool(each.tpots) == (row.scenario != "prefill")
            assert (each.slowdown is None) == (row.scenario != "mixed")
    show_report(bench.machine, bench.describe(), rows)
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


def test_figures_of_the_largest_batch_are_written_for_a_plan(tiny, tmp_path):
    path = tmp_path / "figures.json"
    options = BenchOptions(
        str(tiny),
        scenarios=("decode", "prefill", "image"),
        batch_sizes=(1, 2),
        num_tokens=4,
        rounds=1,
    )
    run(options, figures=path)
    found = read_figures(path).engine
    assert found is not None
    assert (found.model, found.batch_size) == (str(tiny), 2)
    assert 0 < found.prompt_token_s < 10 * found.output_token_s
    assert found.image_s is not None
    with pytest.raises(ValueError, match="must contain decode and prefill"):
        run(replace(options, scenarios=("image",)), figures=path)


def test_the_slowdown_is_the_growth_of_gaps_beside_a_prompt():
    times = {"a": [1.0, 2.0, 3.0, 4.5, 6.5]}
    run = Run(6.5, times, 20, 1, [], late_at=3.0)
    assert run.slowdown == 2.0
    assert run.ttfts == [3.5]
