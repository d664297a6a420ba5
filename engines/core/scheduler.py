"""Continuous batching: chooses the sequences and tokens of each step, and launches it.

Called by the engine. One loop over one token budget: the running sequences, oldest first, then the waiting ones.
Chunked prefill, prefix hits, preemption and takeover are one case: `num_computed_tokens` catches up with `num_tokens`.
Interactive requests precede batch work. While interactive requests decode, prefill has a smaller budget.
"""

import time
from collections import OrderedDict
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile

from msgspec import Struct

from engines.core.blocks import BlockManager
from engines.core.budget import StepBudget, StepLimits
from engines.core.runner import (
    DeviceOutOfMemory,
    ModelRunner,
    RunningStep,
    SequenceFailure,
    StepResult,
)
from engines.core.sequence import Batch, ImageInput, ScheduledSequence, Sequence
from engines.core.speculation import Speculator
from shared.protocol import FinishReason


@dataclass(eq=False)
class Scheduler:
    """Owns every sequence from `add` to `finish`.

    No sequence starves: the oldest running sequence can preempt all others, each sequence fits into the pool at its
    maximum length, and a batch sequence is overtaken a limited number of times.
    """

    blocks: BlockManager
    _limits: StepLimits
    max_num_seqs: int
    eos_token_ids: Set[int]
    binds_prompts: bool = False  #: a prompt is computed in one step, regardless of the budget
    speculator: Speculator | None = None
    num_preemptions: int = 0
    running: OrderedDict[str, Sequence] = field(default_factory=OrderedDict)  #: oldest first
    waiting: OrderedDict[str, Sequence] = field(default_factory=OrderedDict)
    _over_budget: Set[str] = frozenset()  #: requests whose image is not fully encoded yet

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; interactive sequences precede batch sequences."""
        _enter(self.waiting, sequence)

    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self) -> Batch:
        """Plan the next step and allocate its blocks. After a failed step it may be called again without `update`."""
        self.blocks.begin_step()
        if self.waiting:
            self._make_way()
        budget = self._limits.budget(self.running)
        batch = Batch(max_vision_s=budget.max_vision_s)
        self._schedule_running(batch, budget)
        if self.waiting:
            self._schedule_waiting(batch, budget)
        return batch

    def update(self, batch: Batch, result: StepResult) -> None:
        """Append the tokens of a step, and free the blocks of finished sequences.

        `over_budget` requests use no prefill budget: a step with decoding sequences computes none of their tokens.
        """
        self._over_budget = result.over_budget
        block_size, num_computed = self.blocks.block_size, result.num_computed
        for item, choice in zip(batch.items, result.choices, strict=True):
            sequence = item.sequence
            end = item.end
            if num_computed:
                end = item.start + num_computed.get(sequence.request_id, item.num_new_tokens)
                if end == item.start:
                    continue
            if item.draft:  # rejected tokens do not count
                assert choice is not None
                end += len(choice.following) - len(item.draft)
            sequence.num_computed_tokens = end
            if sequence.num_scored_tokens < sequence.num_prompt_tokens:
                scored_end = min(end + 1, sequence.num_prompt_tokens)
                sequence.num_scored_tokens = max(sequence.num_scored_tokens, scored_end)
            if choice is not None:
                sequence.token_ids.append(choice.token_id)
                if choice.following:
                    sequence.token_ids += [each.token_id for each in choice.following]
            if end // block_size > sequence.num_published_blocks:
                self.blocks.publish(sequence)
            reason = None if choice is None else self.find_finish_reason(sequence)
            if reason is not None:
                self.finish(sequence, reason)

    def find_finish_reason(self, sequence: Sequence) -> FinishReason | None:
        token_ids = sequence.token_ids
        num_output_tokens = len(token_ids) - sequence.num_prompt_tokens
        if num_output_tokens == 0:
            return None
        is_end = token_ids[-1] in self.eos_token_ids and not sequence.sampling.ignore_eos
        if is_end or token_ids[-1] in sequence.sampling.stop_token_ids:
            return FinishReason.STOP
        if num_output_tokens >= sequence.max_output_tokens:
            return FinishReason.LENGTH
        return None

    def find(self, request_id: str) -> Sequence:
        return self.running.get(request_id) or self.waiting[request_id]

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state and free its blocks."""
        self.running.pop(sequence.request_id, None)
        self.waiting.pop(sequence.request_id, None)
        self.blocks.free(sequence)
        sequence.is_running = False
        sequence.finish_reason = reason

    def is_waited_for(self) -> bool:
        """Whether the next `schedule` could start a waiting sequence, perhaps by preemption."""
        if not self.waiting:
            return False
        if self._has_room_for_next():
            return True
        first, youngest = next(iter(self.waiting.values())), next(reversed(self.running.values()))
        return youngest.is_preemptible and not first.is_preemptible

    def _make_way(self) -> None:
        """Preempt batch sequences, youngest first, for the first waiting interactive sequence.

        Called once per step. Nothing is preempted if preempting all batch sequences would not make enough room.
        """
        if next(iter(self.waiting.values())).is_preemptible:
            return
        victims = list(takewhile(lambda s: s.is_preemptible, reversed(self.running.values())))
        num_held = sum(len(victim.block_ids) for victim in victims)
        if not (victims and self._has_room_for_next(len(victims), num_held)):
            return
        for victim in victims:
            if self._has_room_for_next():
                return
            self._preempt(victim)

    def _has_room_for_next(self, num_leaving: int = 0, num_freed: int = 0) -> bool:
        """Whether the first waiting sequence could start after this many sequences and blocks are freed."""
        num_running = len(self.running) - num_leaving
        if num_running == self.max_num_seqs:
            return False
        sequence = next(iter(self.waiting.values()))
        prefix = self.blocks.find_prefix(sequence)
        return self.blocks.can_admit(sequence, prefix, num_spare_blocks=num_running - num_freed)

    def _schedule_running(self, batch: Batch, budget: StepBudget) -> None:
        items, over_budget, block_size = batch.items, self._over_budget, self.blocks.block_size
        may_draft: bool | None = None
        for sequence in tuple(self.running.values()):
            if budget.num_tokens == 0 or not sequence.is_running:
                break  # preempted for an older sequence, like all sequences after this one
            start = sequence.num_computed_tokens
            num_pending = len(sequence.token_ids) - start
            num_new = 1 if num_pending == 1 else budget.fit(num_pending)
            if start < sequence.num_prompt_tokens:
                num_new = budget.take_scored(sequence, start, num_new)
                num_new = self._limit_by_images(sequence, start, num_new, budget)
            if num_new == 0:
                continue
            end = start + num_new
            if end > len(sequence.block_ids) * block_size and not self._reserve(sequence, end):
                continue
            history = sequence.history
            if num_pending == 1 and history is not None and not history.rests(sequence):
                if may_draft is None:
                    may_draft = self._may_draft()
                if may_draft:
                    items.append(self._with_draft(sequence, budget))
                    continue
            items.append(ScheduledSequence(sequence, num_new))
            if num_pending == 1:
                budget.num_tokens -= 1
                continue
            budget.take(num_new, num_pending, is_over_budget=sequence.request_id in over_budget)
            if num_new > 1:
                self.blocks.promise(sequence, num_new)

    def _may_draft(self) -> bool:
        """Whether no sequence has prefill work, which has priority over drafts."""
        if self.waiting and len(self.running) < self.max_num_seqs:
            return False
        return all(sequence.num_pending_tokens == 1 for sequence in self.running.values())

    def _with_draft(self, sequence: Sequence, budget: StepBudget) -> ScheduledSequence:
        """Schedule a decoding sequence, with a draft if the budget and free blocks allow it."""
        assert self.speculator is not None
        draft = self.speculator.draft(
            sequence, len(self.running), budget.num_tokens - 1, budget.num_prefill_tokens
        )
        if draft and not self.blocks.grow(sequence, len(sequence.token_ids) + len(draft)):
            draft = ()
        budget.take(1, 1)
        budget.take(len(draft), len(draft) + 1)
        return ScheduledSequence(sequence, 1 + len(draft), draft=draft)

    def _schedule_waiting(self, batch: Batch, budget: StepBudget) -> None:
        """Start waiting sequences in order while tokens, sequences and blocks allow it.

        One spare block per running sequence avoids an immediate preemption. A sequence that was just preempted is
        first in the queue and does not fit, so no other sequence starts.
        """
        while self.waiting and budget.num_tokens > 0 and len(self.running) < self.max_num_seqs:
            sequence = next(iter(self.waiting.values()))
            prefix = self.blocks.find_prefix(sequence)
            if self.blocks.is_promised(sequence, len(prefix)):
                return  # wait a step: another sequence with this prompt (n > 1) is filling the prefix cache
            if not self.blocks.can_admit(sequence, prefix, num_spare_blocks=len(self.running)):
                return
            start = len(prefix) * self.blocks.block_size
            num_pending = sequence.num_tokens - start
            num_new = budget.take_scored(sequence, start, budget.fit(num_pending))
            num_new = self._limit_by_images(sequence, start, num_new, budget)
            if num_new == 0:
                return
            self.blocks.admit(sequence, prefix)
            self.blocks.grow(sequence, start + num_new)
            del self.waiting[sequence.request_id]
            sequence.is_running = True
            _enter(self.running, sequence)
            self._note_overtaking(sequence)
            batch.items.append(ScheduledSequence(sequence, num_new))
            budget.take(num_new, num_pending)
            self.blocks.promise(sequence, num_new)

    def _note_overtaking(self, started: Sequence) -> None:
        """Increment `num_overtakes` of the first waiting batch sequence and of the first one in prefill."""
        if started.is_preemptible:
            return
        for queue in (self.running, self.waiting):
            for other in queue.values() if _ends_with_batch_work(queue) else ():
                if other.is_preemptible and (not other.is_running or other.num_pending_tokens > 1):
                    other.num_overtakes += 1
                    _enter(queue, other)
                    break

    def _limit_by_images(
        self, sequence: Sequence, start: int, num_new: int, budget: StepBudget
    ) -> int:
        """Limit the tokens so that they do not reach an image that this step cannot encode.

        If the last chunk of a running sequence ended within an image, this image is already encoded. Images and prompts
        with bidirectional attention are computed in one step, regardless of the budget.
        """
        if self.binds_prompts and num_new > 0:
            for image in sequence.images:
                budget.take_image(image.image_hash)
            return max(num_new, sequence.num_prompt_tokens - start)
        for image in sequence.images:
            if image.offset >= start + num_new:
                break
            if image.is_whole:
                num_new = _to_end_of_run(image, start, num_new)
            if image.offset + image.num_tokens <= start:
                continue
            if image.offset < start and sequence.is_running:
                continue
            if not budget.take_image(image.image_hash):
                return max(image.offset - start, 0)
        return num_new

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate blocks for a running sequence. If too few are free, preempt the youngest sequences, or this one."""
        while not self.blocks.grow(sequence, num_tokens):
            victim = next(reversed(self.running.values()))
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Free a sequence's blocks; it keeps its tokens and becomes the first waiting sequence of its class."""
        del self.running[sequence.request_id]
        self.blocks.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.is_running = False
        _enter(self.waiting, sequence, first=True)
        self.num_preemptions += 1


def _to_end_of_run(image: ImageInput, start: int, num_new: int) -> int:
    """Extend `num_new` to the end of a run of image placeholder tokens."""
    for first, stop in image.slot_runs:
        if image.offset + first < start + num_new < image.offset + stop:
            return image.offset + stop - start
    return num_new


def _enter(queue: OrderedDict[str, Sequence], sequence: Sequence, *, first: bool = False) -> None:
    """Queue a sequence at the end or start of its class; interactive sequences precede batch work."""
    is_preemptible = sequence.is_preemptible
    is_new = sequence.request_id not in queue
    if is_new and not first and (is_preemptible or not _ends_with_batch_work(queue)):
        queue[sequence.request_id] = sequence
        return
    behind = [
        request_id
        for request_id, other in queue.items()
        if (other.is_preemptible and not is_preemptible)
        or (first and other.is_preemptible == is_preemptible)
    ]
    queue[sequence.request_id] = sequence
    for request_id in behind:
        queue.move_to_end(request_id)


def _ends_with_batch_work(queue: OrderedDict[str, Sequence]) -> bool:
    """Whether a queue has batch work, which follows all interactive sequences."""
    return bool(queue) and next(reversed(queue.values())).is_preemptible


class _LaunchedStep(Struct):
    batch: Batch
    step: RunningStep
    launch_s: float


def _launch(runner: ModelRunner, batch: Batch) -> _LaunchedStep:
    started_at = time.perf_counter()
    step = runner.launch(batch)
    return _LaunchedStep(batch, step, time.perf_counter() - started_at)


@dataclass(eq=False)
class StepPipeline:
    """Runs at most two steps at a time: the awaited step, and a step launched ahead.

    Only a pure decode step can be planned while the device computes the present one. Prefill, images, new requests,
    preemption and failures are handled when no step is in flight.
    """

    _scheduler: Scheduler
    _limits: StepLimits
    _is_overlapping: bool
    num_overlapped: int = 0  #: steps launched while another was in flight
    _ahead: _LaunchedStep | None = None

    @property
    def has_work(self) -> bool:
        return self._ahead is not None

    def run(self, runner: ModelRunner) -> tuple[Batch, StepResult]:
        """Compute the step launched ahead, else the scheduler's next step. Drops sequences that ended meanwhile.

        Returns an empty batch after an out-of-memory error. Raises: SequenceFailure, DeviceOutOfMemory if steps
        cannot be smaller; no step is in flight then.
        """
        ahead, self._ahead = self._ahead, None
        batch = self._scheduler.schedule() if ahead is None else ahead.batch
        if not batch.items:
            return batch, StepResult([])
        try:
            launched = ahead or _launch(runner, batch)
            if self._is_overlapping and launched.step.can_be_followed:
                self._ahead = self._launch_next(runner, batch)
            result = launched.step.wait()
        except DeviceOutOfMemory:
            self.discard()
            self._limits.halve(batch)
            return Batch(), StepResult([])
        except SequenceFailure as failure:
            self.discard()
            sequences = {item.sequence.request_id: item.sequence for item in batch.items}
            failed = sequences.get(failure.request_id)
            if failed is not None and failed.finish_reason is not None:
                return Batch(), StepResult([])
            raise
        self._limits.note(batch, result, launched.launch_s)
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
        """Launch the step after the step in flight, if it can be planned."""
        following = self._plan_next(batch)
        if not following.items:
            return None
        try:
            ahead = _launch(runner, following)
        except (SequenceFailure, DeviceOutOfMemory):
            return None  # the scheduler plans it again and handles a repeated failure
        self.num_overlapped += 1
        return ahead

    def _plan_next(self, batch: Batch) -> Batch:
        """Decode steps of all sequences in a launched batch; empty if any other work is due.

        Sequences that reach `max_tokens` with the launched step are skipped; tokens after a stop are discarded.
        Changes block tables only.
        """
        scheduler = self._scheduler
        # without sequences that ended since the batch was planned
        running = [
            (place, item) for place, item in enumerate(batch.items) if item.sequence.is_running
        ]
        are_all = running and len(running) == len(scheduler.running)
        if not are_all or not all(item.samples for _, item in running) or scheduler.is_waited_for():
            return Batch()
        following = Batch()
        for place, item in running:
            sequence = item.sequence
            if sequence.constraint is not None or item.draft:  # needs the token in flight
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
        if item.sequence.is_running
    ]
    if len(pairs) == len(batch.items):
        return batch, result
    return Batch([item for item, _ in pairs]), StepResult([choice for _, choice in pairs])
