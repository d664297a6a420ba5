"""The step behind one whose tokens are not known yet.

Used by the step pipeline, beside the scheduler. It plans one kind of step, everybody decoding on,
and changes nothing but block tables, which may grow early.
"""

from engines.core.scheduler import Scheduler
from engines.core.sequence import Batch, ScheduledSequence, SequenceStatus


def plan_next(scheduler: Scheduler, batch: Batch) -> Batch:
    """The next token of everybody in a launched batch; empty where anything else might have to happen.

    Whose answer is as long as it may be with the launched token is left out. Whose answer ends with it for another
    reason is planned in vain.
    """
    running = [
        (place, item)
        for place, item in enumerate(batch.items)
        if item.sequence.status is SequenceStatus.RUNNING  # others ended since they were planned
    ]
    are_all = running and len(running) == len(scheduler.running)
    if not are_all or not all(item.samples for _, item in running) or scheduler.is_waited_for():
        return Batch()
    following = Batch()
    for place, item in running:
        sequence = item.sequence
        num_output_tokens = item.end + 1 - sequence.num_prompt_tokens
        if num_output_tokens >= sequence.max_output_tokens:
            continue
        if not scheduler.blocks.grow(sequence, item.end + 1):
            return Batch()
        following.items.append(ScheduledSequence(sequence, 1, follows=place))
    return following
