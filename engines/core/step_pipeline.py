"""Launches the scheduler's steps and waits for them: one by one, or one behind another.

Used by the engine. While the device computes a step, the one behind it is planned and launched if
it can be known (`lookahead`), so that the device does not rest while the host handles tokens.
Whatever else has to happen - prompts, images, newcomers, preemption, failures - happens when no
step is under way.
"""

from contextlib import suppress

from engines.core.lookahead import plan_next
from engines.core.runner import (
    DeviceOutOfMemory,
    ModelRunner,
    RunningStep,
    SequenceFailure,
    StepResult,
)
from engines.core.scheduler import Scheduler
from engines.core.sequence import Batch, SequenceStatus
from engines.core.step_budget import StepBudget


class StepPipeline:
    """At most two steps are under way: one that is waited for, and one behind it."""

    def __init__(self, scheduler: Scheduler, *, is_overlapping: bool) -> None:
        self._scheduler = scheduler
        self._budget = StepBudget(scheduler)
        self._is_overlapping = is_overlapping
        self._ahead: tuple[Batch, RunningStep] | None = (
            None  # launched before what it follows was handled
        )
        self.num_overlapped = 0  #: steps that were launched behind one that was under way

    @property
    def has_work(self) -> bool:
        """Whether a step is under way."""
        return self._ahead is not None

    def advance(self, runner: ModelRunner) -> tuple[Batch, StepResult] | None:
        """Compute a step: the shares of sequences that have not ended meanwhile, and what came of them.

        None if there is nothing to compute, or no memory for it. Raises: SequenceFailure, and DeviceOutOfMemory when
        steps cannot be smaller; then no step is under way, and what was is scheduled again.
        """
        batch, step = self._ahead or (self._scheduler.schedule(), None)
        if not batch.items:
            return None
        was_ahead = step is not None
        self._ahead = None
        try:
            step = step or runner.launch(batch)
            if self._is_overlapping and step.can_be_followed:
                self._ahead = self._follow(batch, runner)
            result = step.wait()
        except DeviceOutOfMemory:
            self.discard()
            self._budget.halve(batch)
            return None
        except SequenceFailure as failure:
            self.discard()
            if _has_ended(batch, failure.request_id):
                return None
            raise
        self._budget.note_success()
        if was_ahead:
            self._scheduler.blocks.unpark()
            batch, result = _without_ended(batch, result)
        if self._ahead is not None:
            self._scheduler.blocks.park_freed()
        return batch, result

    def discard(self) -> None:
        """Wait for the step that is under way, and forget what it computes."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            with suppress(SequenceFailure, DeviceOutOfMemory):
                ahead[1].wait()
        self._scheduler.blocks.unpark()

    def _follow(self, batch: Batch, runner: ModelRunner) -> tuple[Batch, RunningStep] | None:
        """Launch the step behind one that is under way, if it can be known and the device takes it."""
        following = plan_next(self._scheduler, batch)
        if not following.items:
            return None
        try:
            step = runner.launch(following)
        except (SequenceFailure, DeviceOutOfMemory):
            return None  # planned again by the scheduler, and dealt with if it fails then
        self.num_overlapped += 1
        return following, step


def _without_ended(batch: Batch, result: StepResult) -> tuple[Batch, StepResult]:
    """A step without the shares of sequences that ended while it was computed: nobody is to see their tokens."""
    pairs = [
        (item, choice)
        for item, choice in zip(batch.items, result.choices, strict=True)
        if item.sequence.status is SequenceStatus.RUNNING
    ]
    if len(pairs) == len(batch.items):
        return batch, result
    return Batch([item for item, _ in pairs]), StepResult([choice for _, choice in pairs])


def _has_ended(batch: Batch, request_id: str) -> bool:
    """Whether a failure is of a sequence that ended while the step was computed: it is nobody's then."""
    return any(
        item.sequence.request_id == request_id and item.sequence.status is SequenceStatus.FINISHED
        for item in batch.items
    )
