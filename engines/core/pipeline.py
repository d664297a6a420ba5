"""Launch-ahead: the next step is launched while the device computes the present one.

Only a pure decode step can be planned ahead. Prefill, images, new requests, preemption and failures are handled when no
step is in flight.
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
    """At most two steps in flight: the one that is awaited and one launched ahead."""

    def __init__(self, scheduler: Scheduler, limits: StepLimits, *, is_overlapping: bool) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._is_overlapping = is_overlapping
        self._ahead: _LaunchedStep | None = None
        self.num_overlapped = 0  #: steps launched while another was in flight

    @property
    def has_work(self) -> bool:
        return self._ahead is not None

    def schedule(self) -> Batch:
        """The batch that was launched ahead, else the scheduler's next."""
        return self._scheduler.schedule() if self._ahead is None else self._ahead.batch

    def run(self, runner: ModelRunner, batch: Batch) -> tuple[Batch, StepResult]:
        """Compute a batch of `schedule`. Returns the items whose sequences have not ended meanwhile.

        Returns an empty batch after an out-of-memory error. Raises: SequenceFailure, DeviceOutOfMemory if steps
        cannot be smaller; no step is in flight then.
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
        """Wait for the step in flight and drop its result."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            with suppress(SequenceFailure, DeviceOutOfMemory):
                ahead.step.wait()
        self._scheduler.blocks.unpark()

    def _launch_next(self, runner: ModelRunner, batch: Batch) -> _LaunchedStep | None:
        """Launch the step behind one in flight, if it can be planned."""
        following = self._plan_next(batch)
        if not following.items:
            return None
        started_at = time.perf_counter()
        try:
            step = runner.launch(following)
        except (SequenceFailure, DeviceOutOfMemory):
            return None  # the scheduler plans it again and handles a repeated failure
        self.num_overlapped += 1
        return _LaunchedStep(following, step, time.perf_counter() - started_at)

    def _plan_next(self, batch: Batch) -> Batch:
        """Decode steps of all sequences in a launched batch; empty if any other work is due.

        Sequences that reach `max_tokens` with the launched step are skipped; tokens behind a stop are discarded.
        Only block tables change.
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
    """A step without the sequences that ended while it was computed."""
    pairs = [
        (item, choice)
        for item, choice in zip(batch.items, result.choices, strict=True)
        if item.sequence.status is SequenceStatus.RUNNING
    ]
    if len(pairs) == len(batch.items):
        return batch, result
    return Batch([item for item, _ in pairs]), StepResult([choice for _, choice in pairs])


def _has_ended(batch: Batch, request_id: str) -> bool:
    """Whether the sequence that failed had already ended."""
    return any(
        item.sequence.request_id == request_id and item.sequence.status is SequenceStatus.FINISHED
        for item in batch.items
    )
