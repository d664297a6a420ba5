import time

import pytest

from engines.base import EngineCall
from engines.mock.engine import EOS_ID
from engines.registry import create_engine
from shared.protocol import ChatMessage, FinishReason, Generate, SamplingParams, TextPart
from tests.factories_engine import (
    answer_alone,
    make_engine,
    make_image,
    make_mock,
    make_request,
    run_all,
)


def test_an_answer_ends_after_min_tokens_unless_eos_is_ignored():
    answer = answer_alone(make_request(), num_output_tokens=6)
    assert len(answer.text.split(" ")) == 5
    assert answer.token_ids[-1] == EOS_ID
    assert answer.finish_reason is FinishReason.STOP
    answer = answer_alone(make_request(max_tokens=200, min_tokens=9), num_output_tokens=4)
    assert len(answer.token_ids) == 10
    assert answer.finish_reason is FinishReason.STOP
    answer = answer_alone(make_request(max_tokens=200, ignore_eos=True), num_output_tokens=4)
    assert len(answer.token_ids) == 200
    assert EOS_ID not in answer.token_ids
    assert len(set(answer.token_ids[100:])) > 50


def test_images_are_encoded_once_while_the_cache_has_room():
    engine = make_engine(max_num_batched_tokens=8)
    run_all(engine, make_request("a", "x" * 20, images=(make_image(2, 12, "cat"),)))
    run_all(engine, make_request("b", "y" * 20, images=(make_image(4, 12, "cat"),)))
    stats = engine.stats()
    assert (stats.num_encoder_queries, stats.num_encoder_hits) == (2, 1)
    assert stats.encoder_cache_bytes == stats.memory_bytes["encoder_cache"] > 0

    engine = make_engine(encoder_cache_bytes=20_000)
    for name in "abcdef":
        run_all(engine, make_request(name, "x" * 20, images=(make_image(2, 12, name),)))
    assert 0 < engine.stats().encoder_cache_bytes <= 20_000


def test_the_step_time_is_the_sum_of_its_parts(monkeypatch: pytest.MonkeyPatch):
    sleeps: list[float] = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    monkeypatch.setattr(time, "perf_counter", lambda: sum(sleeps))
    mock = make_mock(num_output_tokens=3, vision_s=1.0, prefill_s_per_token=0.1, decode_s=0.5)
    images = (make_image(0, 8, "cat"), make_image(8, 8, "dog"))
    run_all(make_engine(mock=mock), make_request(prompt="x" * 20, images=images))
    assert sleeps == pytest.approx([2.0 + 2.0 + 0.5, 0.5, 0.5])


def test_reasoning_is_separated_counted_and_omitted_on_request():
    mock = make_mock(num_output_tokens=6, num_reasoning_tokens=5).model_dump()
    engine = create_engine({"kind": "mock", "num_kv_blocks": 256, "mock": mock}).engine
    messages = (ChatMessage("user", (TextPart("hello"),)),)
    found = []
    for options in ({}, {"enable_thinking": False}):
        task = Generate(messages, SamplingParams(temperature=0.0), template_options=options)
        answer = run_all(engine, engine.prepare(EngineCall("r", task), []))["r"]
        assert "think" not in answer.reasoning + answer.text
        usage = answer.last.usage
        assert usage.num_output_tokens == len(answer.token_ids)
        words = len(answer.reasoning.split()), len(answer.text.split())
        found.append((*words, usage.num_reasoning_tokens))
    assert found == [(5, 5, 5 + len("<think>\n" + "\n</think>")), (0, 5, 0)]
