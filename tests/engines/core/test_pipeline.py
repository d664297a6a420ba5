"""Overlapped steps: a step is launched before the tokens of the previous one are known."""

from collections import Counter

import pytest

from engines.core.engine import BatchingEngine
from engines.core.runner import DeviceOutOfMemory, SequenceFailure
from engines.core.sequence import Batch
from engines.mock.engine import EOS_ID
from shared.protocol import FinishReason
from tests.factories_engine import (
    CheckingRunner,
    CheckingStep,
    answer_alone,
    make_engine,
    make_image,
    make_request,
    run_all,
)


def overlapping(**config: object) -> BatchingEngine:
    return make_engine(overlap_steps=True, **config)


Launches = list[dict[str, int | None]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Records for each launch the sequences of the step and their indices in the step in flight."""
    seen: Launches = []
    launch = CheckingRunner.launch

    def note(self: CheckingRunner, batch: Batch) -> CheckingStep:
        seen.append({item.sequence.request_id: item.in_flight_index for item in batch.items})
        return launch(self, batch)

    monkeypatch.setattr(CheckingRunner, "launch", note)
    return seen


STEPS: Launches = [{"a": None, "b": None}, {"a": 0, "b": 1}, {"b": 1}, {"b": 0}]


@pytest.mark.parametrize(
    ("runs_async", "config", "expected"),
    [
        pytest.param(False, {"overlap_steps": True}, STEPS, id="enabled"),
        pytest.param(True, {}, STEPS, id="asynchronous"),
        pytest.param(True, {"overlap_steps": False}, None, id="disabled"),
        pytest.param(False, {}, None, id="synchronous"),
    ],
)
def test_a_step_is_launched_before_the_previous_tokens_are_known(
    launches: Launches, runs_async: bool, config, expected, monkeypatch: pytest.MonkeyPatch
):
    """No step is launched beyond the last token of a known length."""
    monkeypatch.setattr(CheckingRunner, "runs_async", runs_async)
    requests = [make_request(name, name * 9, max_tokens=2 * n) for n, name in enumerate("ab", 1)]
    run_all(make_engine(**config), *requests)
    alone: Launches = [dict.fromkeys(names) for names in ("ab", "ab", "b", "b")]
    assert launches == (expected or alone)


def test_blocks_with_discarded_tokens_are_not_shared():
    """The step after the end fills the last slot of a block."""
    engine = overlapping(num_output_tokens=4)
    first = run_all(engine, make_request("a", prompt="x" * 4))["a"]
    assert first.token_ids[-1] == EOS_ID
    again = make_request("b", prompt=[*b"xxxx", *first.token_ids, 7])
    answer = run_all(engine, again)["b"]
    assert answer.first_usage is not None
    assert answer.first_usage.num_cached_tokens == 4


def test_new_requests_start_after_the_step_in_flight(launches: Launches):
    engine = overlapping()
    engine.add(make_request("a", "x" * 9))
    while len(launches) < 3:
        engine.step()
    engine.add(make_request("b", "y" * 9, images=(make_image(),)))
    while len(launches) < 5:
        engine.step()
    assert launches[2:] == [{"a": 0}, {"a": None, "b": None}, {"a": 0, "b": 1}]


def test_no_sequence_is_preempted_while_a_step_is_in_flight(launches: Launches):
    engine = overlapping(num_kv_blocks=9, num_output_tokens=16)
    requests = [make_request(name, name * 8) for name in "ab"]
    answers = run_all(engine, *requests)
    assert engine.stats().num_preemptions > 0
    for request in requests:
        assert answers[request.request_id].text == answer_alone(request, 16).text
    assert {"a": None} in launches, "the step in which blocks ran out was not scheduled anew"


def test_a_preempted_stream_has_reported_all_of_its_tokens():
    engine, told = overlapping(num_kv_blocks=9, num_output_tokens=16), Counter[str]()
    for name in "ab":
        engine.add(make_request(name, name * 8))
    while not engine.scheduler.num_preemptions:
        for output in engine.step():
            told[output.request_id] += len(output.token_ids)
    [preempted] = engine.scheduler.waiting.values()
    assert told[preempted.request_id] == preempted.num_output_tokens > 0


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int, failure: Exception, when: str) -> None:
    """Makes one launch, or the wait for it, fail."""
    launch, compute = CheckingRunner.launch, CheckingStep.compute
    launched: list[CheckingStep | None] = []

    def fail_launch(self: CheckingRunner, batch: Batch) -> CheckingStep:
        launched.append(None)
        if when == "launch" and len(launched) == number:
            raise failure
        launched[-1] = launch(self, batch)
        return launched[-1]

    def fail_compute(self: CheckingStep) -> None:
        if when == "wait" and len(launched) >= number and launched[number - 1] is self:
            raise failure
        compute(self)

    monkeypatch.setattr(CheckingRunner, "launch", fail_launch)
    monkeypatch.setattr(CheckingStep, "compute", fail_compute)


@pytest.mark.parametrize("when", ["launch", "wait"])
@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_a_step_without_memory_is_retried_with_the_one_launched_after_it(
    number: int, when: str, monkeypatch: pytest.MonkeyPatch
):
    fail_at(monkeypatch, number, DeviceOutOfMemory(), when)
    requests = [make_request(name, name * 9) for name in "abc"]
    answers = run_all(overlapping(), *requests)
    monkeypatch.undo()
    for request in requests:
        assert answers[request.request_id].text == answer_alone(request).text


def test_a_failure_after_the_end_of_an_answer_fails_no_request(monkeypatch: pytest.MonkeyPatch):
    """The sixth token ends one of two answers, so its part of the seventh step is discarded."""
    sixth = answer_alone(make_request()).text.split()[5]
    short, long = make_request("a", stop=(sixth,)), make_request("b", "y" * 9)
    fail_at(monkeypatch, 7, SequenceFailure("a", "no good"), "wait")
    answers = run_all(overlapping(), short, long)
    monkeypatch.undo()
    assert answers["a"].finish_reason is FinishReason.STOP
    assert answers["b"].text == answer_alone(long).text


def test_no_step_is_launched_after_one_that_cannot_be_overlapped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CheckingStep, "can_be_followed", False)
    engine = overlapping()
    run_all(engine, make_request())
    assert engine.pipeline.num_overlapped == 0


def test_closing_waits_for_the_step_in_flight(monkeypatch: pytest.MonkeyPatch):
    waited = []
    wait = CheckingStep.wait
    monkeypatch.setattr(CheckingStep, "wait", lambda self: waited.append(self) or wait(self))
    engine = overlapping()
    engine.add(make_request())
    engine.step()
    assert len(waited) == 1
    engine.close()
    engine.close()
    assert len(waited) == 2
    assert not engine.has_work()
    assert engine.stats().kv_usage_ratio == 0
