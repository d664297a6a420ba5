"""Step budgets: memory limits, and a prefill limit that at most doubles the step time of running streams."""

from typing import Any

import pytest

from engines.core.budget import (
    MAX_SLOWDOWN,
    RECOVERY_STEPS,
    PrefillLimit,
    StepLimits,
    measure_prefill_limit,
)
from engines.core.runner import ComputedStep, StepResult
from engines.core.sequence import Batch, ScheduledSequence
from shared.protocol import Priority
from tests.factories_engine import make_image, make_scheduler, make_sequence, run_step, shares


class TimedRunner:
    """A runner with a simulated clock: a step has a base cost and a cost per stream and prompt token."""

    block_size, num_blocks, max_model_len = 16, 64, 512
    runs_async = False

    def __init__(self, base_s: float, stream_s: float, token_s: float) -> None:
        self.now = 0.0
        self.held: set[str] = set()
        self._costs = base_s, stream_s, token_s

    def launch(self, batch: Batch) -> ComputedStep:
        base_s, stream_s, token_s = self._costs
        for item in batch.items:
            self.held.add(item.sequence.request_id)
            blocks = item.sequence.block_ids
            assert min(len(blocks) * self.block_size, self.max_model_len) >= item.num_new_tokens
            assert all(0 <= block < self.num_blocks for block in blocks)
        streams = sum(item.num_new_tokens == 1 for item in batch.items)
        self.now += base_s + stream_s * streams + token_s * (batch.num_tokens - streams)
        return ComputedStep(StepResult([None] * len(batch.items)))

    def release(self, request_id: str) -> None:
        self.held.discard(request_id)


def measure(monkeypatch: pytest.MonkeyPatch, *costs: float) -> PrefillLimit:
    runner = TimedRunner(*costs)
    monkeypatch.setattr("time.perf_counter", lambda: runner.now)
    limit = measure_prefill_limit(runner, max_tokens=256)  # type: ignore[arg-type]
    assert not runner.held
    return limit


def test_the_limit_is_computed_from_the_measured_step_times(monkeypatch):
    limit = measure(monkeypatch, 0.18, 0.02, 0.004)
    assert limit.num_tokens == pytest.approx((MAX_SLOWDOWN - 1) * 0.2 / 0.004, abs=1)
    assert limit.growth == pytest.approx(0.02 / 0.2)
    assert limit.beside(1) == limit.num_tokens
    assert limit.beside(11) == pytest.approx(2 * limit.num_tokens, abs=1)


@pytest.mark.parametrize(("max_tokens", "beside"), [(2048, 512), (128, 128)])
def test_on_an_asynchronous_device_the_limit_is_fixed_and_not_measured(max_tokens, beside):
    runner = TimedRunner(1.0, 1.0, 1.0)
    runner.runs_async = True
    limit = measure_prefill_limit(runner, max_tokens)  # type: ignore[arg-type]
    for num_streams in (1, 8, 63):
        for _ in range(200):
            limit.note(num_streams, 0, 0.0035)
            limit.note(num_streams, limit.beside(num_streams), 0.02)
            assert limit.beside(num_streams) == beside
    assert limit.spare_s is None
    assert runner.now == 0


def follow(limit: PrefillLimit, token_s: float, num_steps: int) -> list[float]:
    """Returns the durations of steps with a prompt, if steps without one take a second."""
    slowdowns = []
    for _ in range(num_steps):
        limit.note(1, 0, 1.0)
        num_tokens = limit.beside(1)
        slowdowns.append(1.0 + token_s * num_tokens)
        limit.note(1, num_tokens, slowdowns[-1])
    return slowdowns


@pytest.mark.parametrize("token_s", [0.02, 0.01, 0.005])
def test_the_limit_follows_the_step_times(token_s: float):
    """The limit of 80 was measured at 0.01 s per token. Later a token costs more, the same, or less."""
    limit = PrefillLimit(80, spare_s=0.3)

    slowdowns = follow(limit, token_s, 300)[100:]

    assert max(slowdowns) <= MAX_SLOWDOWN + token_s + 0.02
    expected = min((MAX_SLOWDOWN - 1) / token_s, 120)
    assert limit.beside(1) == pytest.approx(expected, rel=0.15, abs=1)
    assert limit.spare_s == pytest.approx(MAX_SLOWDOWN - 1)


@pytest.mark.parametrize(
    ("num_tokens", "token_s", "num_steps", "limited"),
    [
        pytest.param(80, 10.0, 100, 16, id="at least a fifth"),
        pytest.param(6, 10.0, 100, 3, id="a small limit"),
        pytest.param(3, 0.01, 3000, 12, id="a noisy start is forgotten"),
    ],
)
def test_the_limit_stays_within_bounds(num_tokens, token_s, num_steps, limited):
    limit = PrefillLimit(num_tokens)
    follow(limit, token_s, num_steps)
    assert limit.beside(1) == limited


def test_continuous_prefill_is_paused_for_one_step_to_measure_streams():
    limit = PrefillLimit(40)
    limit.note(4, 0, 1.0)
    taken = []
    for _ in range(130):
        taken.append(limit.beside(4))
        limit.note(4, taken[-1], 1.0 + taken[-1] / 100)
    assert taken.count(0) == 2
    assert all(taken[:64])


def test_a_slower_machine_does_not_reduce_the_limit():
    limit = PrefillLimit(40)
    limit.note(4, 0, 1.0)
    for _ in range(3000):
        num_tokens = limit.beside(4)
        limit.note(4, num_tokens, 2 * (1.0 + num_tokens / 100))
    assert limit.beside(4) >= 40


def test_a_request_that_waits_for_its_image_leaves_the_prompt_budget_to_others():
    """Its budget is used by other requests one step later, and again by itself when the image is encoded."""
    scheduler = make_scheduler(prefill_limit=PrefillLimit(6))
    scheduler.add(make_sequence(4, "stream"))
    run_step(scheduler)
    scheduler.add(make_sequence(10, "image", images=(make_image(2, 4),)))
    scheduler.add(make_sequence(token_ids=[9] * 20, request_id="text"))
    waits: Any = {"num_computed": {"image": 0}, "over_budget": frozenset({"image"})}
    assert shares(run_step(scheduler, **waits)) == {"stream": 1, "image": 6}
    both = {"stream": 1, "image": 6, "text": 6}
    assert shares(run_step(scheduler, **waits)) == both
    assert shares(run_step(scheduler, num_computed={"image": 0})) == both
    assert shares(run_step(scheduler)) == {"stream": 1, "image": 6}
    assert shares(run_step(scheduler)) == {"stream": 1, "image": 4, "text": 2}


def batch_of(*num_new_tokens: int, images: int = 0, **fields: Any) -> Batch:
    """Returns a batch of sequences that are scheduled to their ends."""
    slots = tuple(make_image(number, 1, f"image {number}") for number in range(images))
    return Batch(
        [
            ScheduledSequence(make_sequence(count, f"r{place}", images=slots, **fields), count)
            for place, count in enumerate(num_new_tokens)
        ]
    )


def test_steps_shrink_when_memory_runs_out_and_grow_again_later():
    limits = StepLimits(max_tokens=64, max_images=4)

    def size() -> tuple[int, int]:
        budget = limits.budget({})
        return budget.num_tokens, budget.max_images

    limits.halve(batch_of(42, images=2))
    assert size() == (21, 1)
    limits.halve(batch_of(21))
    assert size() == (10, 1)
    sizes = []
    for _ in range(4 * RECOVERY_STEPS):
        limits.note(batch_of(1), StepResult([None]), launch_s=0.1)
        sizes.append(size())
    grown = [(10, 1), (20, 2), (40, 4), (64, 4)]
    assert list(dict.fromkeys(sizes)) == grown
    assert [sizes.count(each) for each in grown[1:3]] == [RECOVERY_STEPS] * 2


def test_a_context_shorter_than_any_chunk_needs_no_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(TimedRunner, "max_model_len", 2)
    assert measure(monkeypatch, 0.18, 0.02, 0.004).num_tokens == 256


def prefill_tokens_beside_one(limits: StepLimits) -> int:
    stream = make_sequence(8, num_computed_tokens=7)
    return limits.budget({"stream": stream}).num_prefill_tokens


MIXED = batch_of(1, 80)


@pytest.mark.parametrize(
    ("slow", "result", "spare_s", "limited"),
    [
        pytest.param(MIXED, StepResult([]), 0.6, 72, id="streams and a prompt"),
        pytest.param(MIXED, StepResult([], vision_s=0.1), 0.6, 80, id="an image"),
        pytest.param(MIXED, StepResult([], num_computed={"r1": 0}), 0.6, 80, id="not computed"),
        pytest.param(
            batch_of(1, 80, priority=Priority.BATCH), StepResult([]), 0.6, 80, id="batch requests"
        ),
        pytest.param(batch_of(1, 80, is_streamed=False), StepResult([]), 0.6, 80, id="no stream"),
        pytest.param(MIXED, StepResult([]), None, 80, id="launching computes nothing"),
    ],
)
def test_only_steps_that_delay_streams_change_the_limit(slow, result, spare_s, limited):
    limits = StepLimits(1024, 8, PrefillLimit(80, spare_s=spare_s))
    limits.note(batch_of(1), StepResult([]), 1.0)
    limits.note(slow, result, 2.5)
    assert prefill_tokens_beside_one(limits) == limited
    assert (limits.budget({}).max_vision_s is None) == (spare_s is None)


def test_a_configured_limit_is_kept_and_the_image_limit_is_measured():
    limits = StepLimits(1024, 8, PrefillLimit(7, spare_s=0.3, is_fixed=True))
    for _ in range(100):
        limits.note(batch_of(1), StepResult([]), 2.0)
        limits.note(MIXED, StepResult([]), 9.0)
        assert prefill_tokens_beside_one(limits) == 7
    assert limits.budget({}).max_vision_s == pytest.approx((MAX_SLOWDOWN - 1) * 2.0)
