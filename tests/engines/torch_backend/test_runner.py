"""The runner protocol: choices in the order of the batch, images encoded once, and classified failures."""

from functools import cache
from typing import Any
from unittest.mock import Mock

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
    """Runs a step and updates the sequences, as the scheduler does."""
    result = runner.launch(Batch(list(items))).wait()
    for item, choice in zip(items, result.choices, strict=True):
        item.sequence.num_computed_tokens += item.num_new_tokens
        if choice is not None:
            item.sequence.token_ids.append(choice.token_id)
    return result


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the number of images of each call of the vision tower."""
    counts: list[int] = []
    encode = pair().ours.encode_images

    def count(pixels: torch.Tensor) -> torch.Tensor:
        counts.append(len(pixels))
        return encode(pixels)

    monkeypatch.setattr(pair().ours, "encode_images", count)
    return counts


def test_images_of_several_requests_are_encoded_together_and_once(encoded):
    runner = make_runner(pair(), max_images_per_step=2)
    two = [share(make_sequence("a", [1, [5], 1])), share(make_sequence("b", [2, [6], 1], 16))]
    result = run(runner, *two)
    assert encoded == [2]
    assert result.vision_s > 0
    assert runner.encoder_cache_counts()[:2] == (4, 2)
    assert run(runner, share(make_sequence("c", [1, [6]], 32))).vision_s == 0.0
    other = make_sequence("d", [1, [6]], 48)
    other.cache_salt = "another tenant"
    run(runner, share(make_sequence("e", [3, 4, [5]], 64)), share(other))
    assert encoded == [2, 2, 1]  # limited by `max_images_per_step`


def test_an_image_is_kept_until_its_last_slot_or_the_end_of_its_request(encoded):
    runner = make_runner(pair(), encoder_cache_bytes=0)
    sequence = make_sequence("a", [[5], 1, [6]])
    for num_new, is_held in [(4, True), (3, True), (3, False), (1, False)]:
        run(runner, share(sequence, num_new))
        assert (runner.encoder_cache_counts()[2] > 0) is is_held
    assert encoded == [1]
    assert runner.encoder_cache_counts()[:2] == (1, 0)
    run(runner, share(make_sequence("b", [[5], 2, [6]], 16), 4))
    runner.release("b")
    assert runner.encoder_cache_counts()[2] == 0


def test_pixels_of_a_wrong_size_fail_only_their_request():
    sequence = make_sequence("wrong", [1, [5]])
    image = sequence.images[0]
    image = type(image)(image.offset, image.num_tokens, image.image_hash, torch.zeros(3, 8, 8))
    sequence.images = (image,)
    with pytest.raises(SequenceFailure, match="not prepared for this model") as failure:
        make_runner(pair()).launch(Batch([share(sequence)])).wait()
    assert failure.value.request_id == "wrong"


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceOutOfMemory),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), DeviceOutOfMemory),
        (RuntimeError("a bug"), RuntimeError),
    ],
)
def test_out_of_memory_is_distinguished_from_other_errors(monkeypatch, error, found):
    runner = make_runner(pair())
    monkeypatch.setattr(pair().ours.language_model, "forward", Mock(side_effect=error))
    sequence = make_sequence("a", [[5, 6]])
    with pytest.raises(Exception) as caught:
        runner.launch(Batch([share(sequence)])).wait()
    assert type(caught.value) is found
    monkeypatch.undo()
    assert run(runner, share(sequence)).choices[0] is not None


@pytest.mark.parametrize("name", ["encode", "encode_in_parts"])
def test_an_image_that_needs_too_much_memory_fails_only_its_request(monkeypatch, name):
    runner, error = make_runner(pair()), torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(pair().ours, name, Mock(side_effect=error))
    items = [share(make_sequence("text", [[5, 6]])), share(make_sequence("image", [[5], 1]))]
    with pytest.raises(SequenceFailure) as failure:
        runner.launch(Batch(items, max_vision_s=None if name == "encode" else 1.0)).wait()
    assert failure.value.request_id == "image"


def test_a_request_with_nan_values_affects_no_other():
    """NaN keys and values stay in freed blocks; the next owner of the blocks must not read them."""
    poisoned = make_model_pair(make_vlm_config())
    with torch.no_grad():
        poisoned.ours.language_model.model.embed_tokens.weight[50] = torch.nan
    engine = make_engine(poisoned, num_kv_blocks=12, enable_prefix_cache=False)
    # different lengths, so the block table of the shorter one is padded and its last block masked
    sound = [
        make_request(poisoned.config, "short", [[5, 6, 7]], max_tokens=9),
        make_request(poisoned.config, "long", [[8] * 9], max_tokens=9),
    ]
    before = run_to_end(engine, sound)
    engine.add(make_request(poisoned.config, "bad", [[50] * 47]))  # all 12 blocks
    assert engine.step()[-1].error is not None
    assert run_to_end(engine, sound) == before


def test_warming_up_fits_the_smallest_cache_and_leaves_no_state():
    for num_kv_blocks in (1, 2, 3, 4, 64):
        engine = make_engine(pair(), num_kv_blocks=num_kv_blocks)
        engine.runner.warm_up()
        assert engine.runner.encoder_cache_counts() == (0, 0, 0)
    request = make_request(pair().config, "a", [[5], 1, [6, 7]])
    assert run_to_end(engine, [request]) == run_to_end(make_engine(pair()), [request])


def test_memory_is_reported_by_use_and_mapped_weights_are_reserved():
    """The system counts such pages as free because it could read them again."""
    memory = make_runner(pair(), num_kv_blocks=10).memory_bytes()
    weights = sum(parameter.nbytes for parameter in pair().ours.parameters())
    # blocks of 4 slots: keys and values, 2 layers, 2 heads, width 8, 4 bytes each
    block_bytes = 4 * 2 * 2 * 2 * 8 * 4
    assert memory == {"weights": weights, "kv_cache": 10 * block_bytes, "encoder_cache": 0}
    config = TorchSettings(block_size=4, max_num_seqs=1000)
    before = weights + 100 * block_bytes
    runner = TorchRunner(pair().ours, config, CPU, torch.float32, free_before_load=before)
    assert runner.num_blocks == 40  # 40 of 100
