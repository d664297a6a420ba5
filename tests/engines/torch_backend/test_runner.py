"""The runner keeps the protocol: choices in the batch's order, images encoded once, failures told apart."""

from functools import cache
from typing import Any

import pytest
import torch

from engines.core.runner import DeviceOutOfMemory, SequenceFailure, StepResult
from engines.core.sequence import Batch, ScheduledSequence, Sequence
from engines.torch_backend.runner import TorchRunner
from engines.torch_backend.settings import TorchSettings
from tests.factories_torch import (
    ModelPair,
    make_engine,
    make_model_pair,
    make_request,
    make_runner,
    make_vlm_config,
    run_to_end,
)

CPU = torch.device("cpu")


@cache
def pair() -> ModelPair:
    return make_model_pair(make_vlm_config())


def make_sequence(
    name: str, parts: list[list[int] | int], first_block: int = 0, **sampling: Any
) -> Sequence:
    request = make_request(pair().config, name, parts, **sampling)
    sequence = Sequence.from_request(request, max_output_tokens=10)
    sequence.block_ids = list(range(first_block, first_block + 16))
    return sequence


def share(sequence: Sequence, num_new_tokens: int | None = None) -> ScheduledSequence:
    return ScheduledSequence(sequence, num_new_tokens or sequence.num_pending_tokens)


def run(runner: TorchRunner, *items: ScheduledSequence) -> StepResult:
    """Run a step and note what it computed, as the scheduler does."""
    result = runner.run(Batch(list(items)))
    for item, choice in zip(items, result.choices, strict=True):
        item.sequence.num_computed_tokens += item.num_new_tokens
        if choice is not None:
            item.sequence.token_ids.append(choice.token_id)
    return result


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each call of the vision tower encodes."""
    counts: list[int] = []
    encode = pair().ours.encode_images

    def count(pixels: torch.Tensor) -> torch.Tensor:
        counts.append(len(pixels))
        return encode(pixels)

    monkeypatch.setattr(pair().ours, "encode_images", count)
    return counts


def test_choices_come_in_the_order_of_the_batch():
    runner = make_runner(pair())
    short = make_sequence("short", [[5, 6]], 0)
    long = make_sequence("long", [[7, 8, 9, 10, 11]], 16)
    run(runner, share(short))
    chunk = share(long, 3)
    mixed = run(runner, chunk, share(short)).choices
    assert mixed[0] is None
    expected = run_to_end(make_engine(pair()), [make_request(pair().config, "short", [[5, 6]])])
    assert mixed[1] is not None
    assert mixed[1].token_id == expected["short"][1]


def test_images_of_different_requests_are_encoded_together(encoded):
    runner = make_runner(pair())
    run(runner, share(make_sequence("a", [1, [5]])), share(make_sequence("b", [2, [6], 3], 16)))
    assert encoded == [3]


def test_the_same_image_in_flight_is_encoded_once(encoded):
    runner = make_runner(pair())
    result = run(
        runner, share(make_sequence("a", [1, [5], 1])), share(make_sequence("b", [1, [6]], 16))
    )
    assert encoded == [1]
    assert result.vision_s > 0
    assert runner.encoder_cache_counts()[:2] == (3, 2)


def test_no_more_images_at_once_than_a_step_may_hold(encoded):
    runner = make_runner(pair(), max_images_per_step=2)
    run(runner, share(make_sequence("a", [1, 2, 3, [5]])))
    assert encoded == [2, 1]


def test_a_known_image_costs_no_vision_time():
    runner = make_runner(pair())
    run(runner, share(make_sequence("a", [1, [5]])))
    assert run(runner, share(make_sequence("b", [1, [6]], 16))).vision_s == 0.0


def test_tenants_do_not_share_images(encoded):
    runner = make_runner(pair())
    other = make_sequence("b", [1, [6]], 16)
    other.cache_salt = "other"
    run(runner, share(make_sequence("a", [1, [5]])), share(other))
    assert encoded == [2]


def test_an_image_cut_by_chunks_is_kept_until_its_last_slot(encoded):
    runner = make_runner(pair(), encoder_cache_bytes=0)
    sequence = make_sequence("a", [[5], 1, [6]])
    for num_new, is_held in [(4, True), (3, True), (3, False), (1, False)]:
        run(runner, share(sequence, num_new))
        assert (runner.encoder_cache_counts()[2] > 0) is is_held
    assert encoded == [1]
    assert runner.encoder_cache_counts()[:2] == (1, 0)


def test_release_frees_the_images_of_a_request_that_ends_early():
    runner = make_runner(pair(), encoder_cache_bytes=0)
    run(runner, share(make_sequence("a", [[5], 1, [6]]), 4))
    runner.release("a")
    assert runner.encoder_cache_counts()[2] == 0


def test_pixels_of_another_models_size_fail_their_request_alone():
    sequence = make_sequence("wrong", [1, [5]])
    image = sequence.images[0]
    image = type(image)(image.offset, image.num_tokens, image.image_hash, torch.zeros(3, 8, 8))
    sequence.images = (image,)
    with pytest.raises(SequenceFailure) as failure:
        make_runner(pair()).run(Batch([share(sequence)]))
    assert failure.value.request_id == "wrong"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_memory_that_runs_out_is_told_apart(monkeypatch, error):
    runner = make_runner(pair())
    decoder = pair().ours.language_model

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(decoder, "forward", fail)
    sequence = make_sequence("a", [[5, 6]])
    with pytest.raises(DeviceOutOfMemory):
        runner.run(Batch([share(sequence)]))
    monkeypatch.undo()
    assert run(runner, share(sequence)).choices[0] is not None


def test_other_errors_are_not_taken_for_memory(monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(pair().ours.language_model, "forward", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        make_runner(pair()).run(Batch([share(make_sequence("a", [[5]]))]))


def test_a_request_whose_numbers_overflow_spoils_no_other():
    """Keys and values that are no numbers stay behind in freed blocks; their next owner must not notice."""
    poisoned = make_model_pair(make_vlm_config())
    with torch.no_grad():
        poisoned.ours.language_model.model.embed_tokens.weight[50] = torch.nan
    engine = make_engine(poisoned, num_kv_blocks=12, enable_prefix_cache=False)
    # of different lengths, so that the shorter one's table is padded and its tail masked
    sound = [
        make_request(poisoned.config, "short", [[5, 6, 7]], max_tokens=9),
        make_request(poisoned.config, "long", [[8] * 9], max_tokens=9),
    ]
    before = run_to_end(engine, sound)
    engine.add(make_request(poisoned.config, "bad", [[50] * 47]))  # all 12 blocks
    assert engine.step()[-1].error is not None
    assert run_to_end(engine, sound) == before


def test_warming_up_leaves_nothing_behind():
    engine = make_engine(pair())
    runner = engine.runner
    assert isinstance(runner, TorchRunner)
    runner.warm_up()
    assert runner.encoder_cache_counts() == (0, 0, 0)
    request = make_request(pair().config, "a", [[5], 1, [6, 7]])
    assert run_to_end(engine, [request]) == run_to_end(make_engine(pair()), [request])


@pytest.mark.parametrize("num_kv_blocks", [1, 2, 3, 4])
def test_warming_up_fits_the_smallest_cache(num_kv_blocks):
    make_runner(pair(), num_kv_blocks=num_kv_blocks).warm_up()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_float32(dtype):
    half = make_model_pair(make_vlm_config(), std=0.15)
    parts = {"a": [[5], 1, [6, 7]], "b": [2, [8, 9, 10]]}

    def first_logprobs(runner: TorchRunner) -> list[float]:
        sequences = [
            make_sequence(name, part, 16 * place, num_logprobs=0, logit_bias={3: 1000.0})
            for place, (name, part) in enumerate(parts.items())
        ]
        steps = [run(runner, *(share(sequence) for sequence in sequences)) for _ in range(4)]
        return [choice.logprob for step in steps for choice in step.choices]

    expected = first_logprobs(make_runner(half))
    half.ours.to(dtype)
    config = TorchSettings(num_kv_blocks=64, block_size=4)
    found = first_logprobs(TorchRunner(half.ours, config, torch.device("cpu"), dtype))
    assert found == pytest.approx(expected, abs=0.1)


def test_memory_is_told_by_use():
    runner = make_runner(pair(), num_kv_blocks=10)
    memory = runner.memory_bytes()
    weights = sum(parameter.nbytes for parameter in pair().ours.parameters())
    # 10 blocks of 4 slots: keys and values of 2 layers, 2 heads, 8 wide, 4 bytes each
    assert memory == {
        "weights": weights,
        "kv_cache": 10 * 4 * 2 * 2 * 2 * 8 * 4,
        "encoder_cache": 0,
    }


def test_the_pages_of_mapped_weights_are_not_given_to_the_kv_cache():
    """The system counts them as free, for it could read them again."""
    weights = make_runner(pair()).memory_bytes()["weights"]
    block_bytes = 2 * 2 * 2 * 8 * 4 * 4
    config = TorchSettings(block_size=4, max_num_seqs=1000)
    before = weights + 100 * block_bytes
    runner = TorchRunner(pair().ours, config, CPU, torch.float32, free_before_load=before)
    assert runner.num_blocks == 40  # of 100


def test_threads_are_set_when_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    for asked, expected in ((2, 2), (0, 1)):  # a small model has one
        config = TorchSettings(num_kv_blocks=1, num_threads=asked)
        TorchRunner(pair().ours, config, torch.device("cpu"), torch.float32)
        assert torch.get_num_threads() == expected
    torch.set_num_threads(before)
