"""Launches the scheduler's steps and waits for them: one by one, or one behind another.

While the device computes a step, the next one is launched if it can be known, so that the device
does not rest while the host handles tokens. That is one kind of step: each sequence decodes its
next token. All else - prompts, images, newcomers, preemption, failures - happens when no step is in
flight.
"""

import time
from contextlib import suppress

from msgspec import Struct

from engines.core.budget import StepLimits
from engines.core.runner import (
    DeviceOutOfMemory,
    ModelRunner,
    RunningStep,
    SequenceFailure,
    StepResult,
)
from engines.core.scheduler import Scheduler
from engines.core.sequence import Batch, ScheduledSequence, SequenceStatus


class _LaunchedStep(Struct):
    batch: Batch
    step: RunningStep
    launch_s: float


class StepPipeline:
    """At most two steps are in flight: one that is waited for, and one launched ahead."""

    def __init__(self, scheduler: Scheduler, limits: StepLimits, *, is_overlapping: bool) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._is_overlapping = is_overlapping
        self._ahead: _LaunchedStep | None = None
        self.num_overlapped = 0  #: steps that were launched while another was in flight

    @property
    def has_work(self) -> bool:
        """Whether a step is in flight."""
        return self._ahead is not None

    def schedule(self) -> Batch:
        """The batch that was launched ahead, or else the scheduler's next."""
        return self._scheduler.schedule() if self._ahead is None else self._ahead.batch

    def run(self, runner: ModelRunner, batch: Batch) -> tuple[Batch, StepResult]:
        """Compute what `schedule` gave. Returns the shares of sequences that did not end meanwhile.

        Empty if there is no memory for it. Raises: SequenceFailure, and DeviceOutOfMemory when
        steps cannot be smaller; then no step is in flight, and what was is scheduled again.
        """
        if not batch.items:
            return batch, StepResult([])
        ahead, self._ahead = self._ahead, None
        try:
            if ahead is None:
                started_at = time.perf_counter()
                step = runner.launch(batch)
                launch_s = time.perf_counter() - started_at
            else:
                step, launch_s = ahead.step, ahead.launch_s
            if self._is_overlapping and step.can_be_followed:
                self._ahead = self._launch_next(runner, batch)
            result = step.wait()
        except DeviceOutOfMemory:
            self.discard()
            self._limits.halve(batch)
            return Batch(), StepResult([])
        except SequenceFailure as failure:
            self.discard()
            if _has_ended(batch, failure.request_id):
                return Batch(), StepResult([])
            raise
        self._limits.note(batch, result, launch_s)
        if ahead is not None:
            self._scheduler.blocks.unpark()
            batch, result = _without_ended(batch, result)
        if self._ahead is not None:
            self._scheduler.blocks.park_freed()
        return batch, result

    def discard(self) -> None:
        """Wait for the step that is in flight, and forget what it computes."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            with suppress(SequenceFailure, DeviceOutOfMemory):
                ahead.step.wait()
        self._scheduler.blocks.unpark()

    def _launch_next(self, runner: ModelRunner, batch: Batch) -> _LaunchedStep | None:
        """Launch the step behind one in flight, if it can be known and the device takes it."""
        following = self._plan_next(batch)
        if not following.items:
            return None
        started_at = time.perf_counter()
        try:
            step = runner.launch(following)
        except (SequenceFailure, DeviceOutOfMemory):
            return None  # planned again by the scheduler, and dealt with if it fails then
        self.num_overlapped += 1
        return _LaunchedStep(following, step, time.perf_counter() - started_at)

    def _plan_next(self, batch: Batch) -> Batch:
        """The next token of each sequence in a launched batch; empty where anything else is due.

        Sequences that reach `max_tokens` by the launched step are skipped; an early stop is
        computed and discarded. Nothing changes but block tables, which may grow early.
        """
        scheduler = self._scheduler
        running = [
            (place, item)
            for place, item in enumerate(batch.items)
            if item.sequence.status
            is SequenceStatus.RUNNING  # others ended since they were planned
        ]
        are_all = running and len(running) == len(scheduler.running)
        if not are_all or not all(item.samples for _, item in running) or scheduler.is_waited_for():
            return Batch()
        following = Batch()
        for place, item in running:
            sequence = item.sequence
            if sequence.constraint is not None or item.draft:  # its next token depends on this one
                return Batch()
            num_output_tokens = item.end + 1 - sequence.num_prompt_tokens
            if num_output_tokens >= sequence.max_output_tokens:
                continue
            if not scheduler.blocks.grow(sequence, item.end + 1):
                return Batch()
            following.items.append(ScheduledSequence(sequence, 1, in_flight_index=place))
        return following


def _without_ended(batch: Batch, result: StepResult) -> tuple[Batch, StepResult]:
    """A step without the shares of sequences that ended while it was computed."""
    pairs = [
        (item, choice)
        for item, choice in zip(batch.items, result.choices, strict=True)
        if item.sequence.status is SequenceStatus.RUNNING
    ]
    if len(pairs) == len(batch.items):
        return batch, result
    return Batch([item for item, _ in pairs]), StepResult([choice for _, choice in pairs])


def _has_ended(batch: Batch, request_id: str) -> bool:
    """Whether the sequence that failed had ended already: the failure is nobody's then."""
    return any(
        item.sequence.request_id == request_id and item.sequence.status is SequenceStatus.FINISHED
        for item in batch.items
    )
