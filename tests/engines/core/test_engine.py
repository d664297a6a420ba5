from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import InvalidRequest, PromptTooLong
from engines.core.engine import BatchingEngine
from engines.core.runner import DeviceOutOfMemory, SequenceFailure
from engines.core.sequence import Batch, EngineRequest
from engines.mock.engine import EOS_ID
from shared.protocol import FinishReason, Priority
from tests.factories_engine import (
    CheckingRunner,
    CheckingStep,
    Clock,
    Transcript,
    answer_alone,
    make_engine,
    make_image,
    make_mock,
    make_request,
    run_all,
)
from tests.integrity import check_scheduler


def fail_next_step(engine: BatchingEngine, *failures: Exception) -> None:
    assert isinstance(engine.runner, CheckingRunner)
    engine.runner.failures += reversed(failures)


def content(answer: Transcript) -> tuple[object, ...]:
    return answer.token_ids, answer.text, answer.finish_reason


def is_same_answer(answer: Transcript, request: EngineRequest) -> bool:
    return content(answer) == content(answer_alone(request))


def test_the_first_output_has_the_usage_before_the_prompt_is_computed():
    engine = make_engine(max_num_batched_tokens=16)
    engine.add(make_request(prompt="x" * 40, images=(make_image(),)))
    (first,) = engine.step()
    assert first.token_ids == ()
    assert first.usage is not None
    assert (first.usage.num_prompt_tokens, first.usage.num_image_tokens) == (40, 8)
    assert engine.step() == []
    (token,) = engine.step()
    assert len(token.token_ids) == 1
    assert token.usage is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def find_timings(answer: Transcript) -> list[float]:
    assert answer.last is not None
    timings = answer.last.timings
    assert timings is not None
    return [timings.queue_s, timings.vision_s, timings.prefill_s, timings.decode_s]


def test_the_time_in_the_engine_is_the_sum_of_its_stages(clock: Clock):
    mock = make_mock(vision_s=3, prefill_s_per_token=0.5, decode_s=1, num_output_tokens=3)
    engine = make_engine(mock=mock, max_num_seqs=1, max_num_batched_tokens=16)
    cat = make_request("cat", "x" * 20, images=(make_image(8),))
    answers = run_all(engine, cat, make_request("text", "y" * 2))
    assert find_timings(answers["cat"]) == [0, 3, 1 + 8 + 1 + 2, 2]
    assert find_timings(answers["text"]) == [17, 0, 1 + 1, 2]
    assert clock.now == 1000 + 17 + 4


@pytest.mark.parametrize("config", [{"max_model_len": 16}, {"num_kv_blocks": 4}])
def test_an_answer_ends_at_the_limit_of_the_context_or_kv_cache(config: dict[str, object]):
    engine = make_engine(**config)
    for max_tokens in (None, 1000):
        answer = run_all(engine, make_request(prompt="x" * 10, max_tokens=max_tokens))["r0"]
        assert len(answer.token_ids) == 6
        assert answer.finish_reason is FinishReason.LENGTH


def test_a_request_with_a_complete_answer_ends_without_a_runner_step():
    engine = make_engine()
    fail_next_step(engine, RuntimeError("not to be run"))
    engine.add(make_request(output_token_ids=(300, EOS_ID)))
    assert engine.has_work()
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.STOP
    assert (output.index, output.token_ids, output.text) == (2, (), "")
    assert not engine.has_work()
    engine.add(make_request(output_token_ids=(300, EOS_ID)))
    engine.abort("r0")
    assert not engine.has_work()


@pytest.mark.parametrize("config", [{"max_model_len": 20}, {"num_kv_blocks": 5}])
def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(config: dict[str, object]):
    engine = make_engine(**config)
    with pytest.raises(PromptTooLong, match=r"20 tokens.*20 tokens"):
        engine.add(make_request(prompt="x" * 20))
    assert not engine.has_work()
    assert len(run_all(engine, make_request(prompt="x" * 19))["r0"].token_ids) == 1


def placed(row: list[int]) -> EngineRequest:
    return EngineRequest("r", [1] * 4, make_request().sampling, positions=(row,))


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        *((make_request(**{name: value}), name) for name, value in (
            ("logit_bias", {100_000: 1.0}), ("logit_bias", {-1: 1.0}), ("stop_token_ids", (100_000,)),
            ("allowed_token_ids", (-1,)), ("output_token_ids", (300, 100_000)),
        )),
        (make_request(prompt=""), "the prompt is empty"),
        (EngineRequest("r", [1, 100_000], make_request().sampling), "100000 .*outside the vocab"),
        (placed([0, 1, 2, 10**6]), "positions beyond"),
    ],
)  # fmt: skip
def test_invalid_requests_are_refused(request_: EngineRequest, reason: str):
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=reason) as refused:
        engine.add(request_)
    assert request_.prompt_token_ids or refused.value.param == "prompt"
    assert not engine.has_work()


def test_blocks_of_a_failed_request_are_not_found():
    """The first chunk was published before the last one produced logits that are not finite."""
    engine = make_engine(max_num_batched_tokens=16)
    assert isinstance(engine.runner, CheckingRunner)
    engine.add(make_request("a", "x" * 40))
    engine.step()
    engine.runner.notes = [float("nan")] * len(engine.runner.notes)
    fail_next_step(engine, SequenceFailure("a", "no numbers"))
    (failed,) = engine.step()
    assert failed.error == "no numbers"

    again = make_request("b", "x" * 40)
    answers = run_all(engine, again)

    assert is_same_answer(answers["b"], again)
    assert engine.stats().num_prefix_hit_tokens == 0


def test_out_of_memory_halves_the_step_and_fails_no_request():
    engine = make_engine(max_num_batched_tokens=64)
    fail_next_step(engine, DeviceOutOfMemory(), DeviceOutOfMemory())
    request = make_request(prompt="x" * 60)
    assert is_same_answer(run_all(engine, request)["r0"], request)
    assert isinstance(engine.runner, CheckingRunner)
    assert [batch.num_tokens for batch in engine.runner.launched[:7]] == [60, 30, *[15] * 4, 1]


def test_out_of_memory_fails_a_request_whose_step_cannot_be_smaller(
    monkeypatch: pytest.MonkeyPatch,
):
    """Attention within the image is bidirectional, so one step must compute the whole image."""
    engine = make_engine(max_num_batched_tokens=8)
    launch = CheckingRunner.launch

    def fail(self: CheckingRunner, batch: Batch) -> CheckingStep:
        if any(item.num_new_tokens >= 30 for item in batch.items):
            raise DeviceOutOfMemory
        return launch(self, batch)

    monkeypatch.setattr(CheckingRunner, "launch", fail)
    image = replace(make_image(2, 30, "cat"), is_whole=True)
    large, other = make_request("large", "x" * 40, images=(image,)), make_request("other", "y" * 9)
    answers = run_all(engine, other, large, make_request("later", "y" * 9))
    assert answers["large"].last.error
    assert is_same_answer(answers["other"], other)
    engine.runner.launched.clear()
    run_all(engine, make_request("long", "z" * 20))
    assert [batch.num_tokens for batch in engine.runner.launched[:3]] == [8, 8, 4]


def test_out_of_memory_for_one_token_and_other_failures_end_the_engine():
    engine = make_engine(max_num_batched_tokens=2)
    engine.add(make_request())
    fail_next_step(engine, DeviceOutOfMemory(), DeviceOutOfMemory())
    engine.step()
    with pytest.raises(DeviceOutOfMemory):
        engine.step()
    engine = make_engine()
    engine.add(make_request())
    fail_next_step(engine, RuntimeError("illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.step()


TINY_CONFIGS = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4, 8]),
        "num_kv_blocks": st.integers(9, 24),
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.integers(1, 24),
        "max_images_per_step": st.integers(1, 2),
        "enable_prefix_cache": st.booleans(),
        "overlap_steps": st.booleans(),
    }
)


IMAGES = [(), (make_image(2, 4, "cat"),), (make_image(1, 3, "dog"), make_image(4, 3, "cat"))]


@st.composite
def tiny_requests(draw: st.DrawFn, request_id: str) -> EngineRequest:
    return make_request(
        request_id,
        prompt="xyxyxyxy"[: draw(st.integers(7, 8))] + "abcdefgh"[: draw(st.integers(0, 6))],
        images=draw(st.sampled_from(IMAGES)),
        cache_salt=draw(st.sampled_from(["", "", "other"])),
        priority=draw(st.sampled_from(Priority)),
        max_tokens=draw(st.none() | st.integers(1, 9)),
        ignore_eos=draw(st.booleans()),
        stop=draw(st.sampled_from([(), ("a",), ("u l", "zz")])),
        seed=draw(st.integers(0, 1)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
    )


@settings(max_examples=150)
@given(st.data())
def test_any_events_keep_the_state_consistent_and_the_answers_equal(data: st.DataObject):
    engine = make_engine(num_output_tokens=6, **data.draw(TINY_CONFIGS))
    requests: dict[str, EngineRequest] = {}
    answers: dict[str, Transcript] = {}

    def step() -> None:
        for output in engine.step():
            answers[output.request_id].append(output)

    events = st.sampled_from(["add", "add", "step", "step", "step", "abort", "take over", "fail"])
    for number, event in enumerate(data.draw(st.lists(events, max_size=40))):
        candidates = sorted(engine.scheduler.running if event == "fail" else requests)
        if event == "step":
            step()
        elif event == "add":
            request = data.draw(tiny_requests(f"r{number}"))
            with suppress(PromptTooLong):
                engine.add(request)
                requests[request.request_id], answers[request.request_id] = request, Transcript()
        elif candidates:
            name = data.draw(st.sampled_from(candidates))
            if event == "take over" and answers[name].last is None:  # the same engine takes it over
                engine.abort(name)
                answers[name].first_usage = None
                emitted = tuple(answers[name].token_ids)
                engine.add(replace(requests[name], output_token_ids=emitted))
            elif event == "abort":
                engine.abort(name)
                del requests[name]
            elif event == "fail":
                fail_next_step(engine, SequenceFailure(name, "bad luck"))
                step()
                del requests[name]
        check_scheduler(engine.scheduler)
    while engine.has_work():
        step()
        check_scheduler(engine.scheduler)
        assert engine.stats().num_steps < 4000, "somebody waits for ever"
    assert isinstance(engine.runner, CheckingRunner)
    assert not engine.runner.known_requests
    assert engine.stats().kv_usage_ratio == 0
    roomy = {"num_kv_blocks": 256, "max_model_len": engine.max_model_len}
    for name, request in requests.items():
        alone = run_all(make_engine(num_output_tokens=6, **roomy), request)[name]
        assert content(answers[name]) == content(alone)
