"""Beside running streams, images are encoded in parts, and only requests with the image wait for it."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.core.engine import BatchingEngine
from engines.core.sequence import ImageInput
from engines.torch_backend.multimodal import image_encoder, parts
from shared.protocol import Priority
from tests.factories_torch import (
    encode_in_smallest_parts,
    make_engine,
    make_model_pair,
    make_request,
    make_vlm_config,
    prefill_progress,
    run_to_end,
    smallest_chunks,
)
from tests.integrity import check_scheduler

PAIR = make_model_pair(make_vlm_config())


@pytest.fixture(autouse=True)
def time_passes_by_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances per operation, so that each part has ten operations."""
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * parts.PART_S / 19)
    monkeypatch.setattr(parts, "time", clock)


@torch.inference_mode()
def count_parts() -> int:
    size = PAIR.config.vision.image_size
    image = ImageInput(0, PAIR.config.tokens_per_image, "image", torch.zeros(3, size, size))
    return sum(1 for _ in PAIR.ours.encode_in_parts(image, torch.device("cpu"), torch.float32))


def make_streaming_engine(num_tokens: int, **changes: int) -> BatchingEngine:
    """Returns an engine with a stream that has its first token, and with images in the smallest parts."""
    engine = make_engine(PAIR, **changes)
    encode_in_smallest_parts(engine)
    engine.add(make_request(PAIR.config, "stream", [[5, 6, 7]], max_tokens=num_tokens))
    engine.step()
    return engine


def steps_until_first_token(engine: BatchingEngine, request_id: str) -> int:
    """Returns the number of steps before a request's first token; the stream gets a token in each of them."""
    for number in range(100):
        stream = engine.scheduler.find("stream")
        num_tokens = stream.num_tokens
        said = {output.request_id: output for output in engine.step()}
        check_scheduler(engine.scheduler)
        assert stream.num_tokens == num_tokens + 1
        if request_id in said and said[request_id].token_ids:
            return number
    raise AssertionError("no token came")


@pytest.mark.parametrize(("num_images", "cache_bytes"), [(1, 0), (2, 1 << 20)])
def test_a_stream_gets_a_token_with_each_part_of_an_image(num_images, cache_bytes):
    engine = make_streaming_engine(60, encoder_cache_bytes=cache_bytes)
    engine.add(make_request(PAIR.config, "late", [*range(num_images), [9]], max_tokens=2))
    assert steps_until_first_token(engine, "late") == num_images * count_parts()
    [last] = [output for output in engine.step() if output.request_id == "late"]
    assert last.timings.vision_s > 0
    assert engine.stats().num_encoder_queries == num_images
    assert engine.stats().num_encoder_hits == 0


@pytest.mark.parametrize("changes", [{"priority": Priority.BATCH}, {"is_streamed": False}])
def test_an_image_is_encoded_at_once_beside_answers_without_a_stream(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(image_encoder, "SECONDS_ALONE", 60.0)  # enough on a busy machine
    engine = make_engine(PAIR)
    encode_in_smallest_parts(engine)
    stream = make_request(PAIR.config, "stream", [[5, 6, 7]], max_tokens=20)
    engine.add(replace(stream, **changes))
    engine.step()
    engine.add(make_request(PAIR.config, "late", [1, [9]]))
    assert steps_until_first_token(engine, "late") == 0


def test_a_prompt_after_an_image_of_another_does_not_wait():
    engine = make_streaming_engine(60, max_mixed_prefill_tokens=3)
    engine.add(make_request(PAIR.config, "image", [1, [9]]))
    engine.add(make_request(PAIR.config, "text", [[1, 2, 3, 4, 5]]))
    assert steps_until_first_token(engine, "text") == 2 < count_parts()


def test_prefill_begins_when_the_first_image_is_encoded():
    engine = make_engine(PAIR)
    encode_in_smallest_parts(engine)
    request = make_request(PAIR.config, "a", [1, 2, 3, [9]])
    with smallest_chunks():
        found = prefill_progress(engine, request)
    per_image = PAIR.config.tokens_per_image
    assert found == sorted(found)
    assert [num * per_image for num, _ in found[:-1]] == [computed for _, computed in found[:-1]]
    assert {num for num, _ in found} == {0, 1, 2, 3}


@pytest.mark.parametrize("beside_a_stream", [False, True])
def test_a_request_aborted_between_two_images_leaves_no_state(beside_a_stream: bool):
    engine = make_streaming_engine(300) if beside_a_stream else make_engine(PAIR)
    encode_in_smallest_parts(engine)
    before = engine.blocks.num_free_blocks
    request = make_request(PAIR.config, "a", [1, 2, [9]])
    with smallest_chunks():
        engine.add(request)
        while engine.scheduler.find("a").num_computed_tokens == 0:
            engine.step()
        engine.abort("a")
        assert engine.runner.encoder_cache_counts()[0] == 1
        engine.abort("stream")
        assert engine.blocks.num_free_blocks >= before
        assert run_to_end(engine, [request]) == run_to_end(make_engine(PAIR), [request])
