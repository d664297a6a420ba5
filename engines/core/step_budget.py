"""How much one step may compute on a device whose memory may turn out too small for it.

Used by the engine, in front of the scheduler.
"""

import logging

from engines.core.runner import DeviceOutOfMemory
from engines.core.scheduler import Scheduler
from engines.core.sequence import Batch

logger = logging.getLogger(__name__)

#: Steps without an accident after which twice as much is tried: another one then costs little.
RECOVERY_STEPS = 1000


class StepBudget:
    """Lowers the scheduler's limits when memory runs out, and raises them slowly to what they were."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._max_tokens = scheduler.max_num_batched_tokens
        self._max_images = scheduler.max_images_per_step
        self._num_good_steps = 0

    def halve(self, batch: Batch) -> None:
        """Let steps be half of what this one was. Raises: DeviceOutOfMemory if it was the smallest."""
        if batch.num_tokens == 1:
            raise DeviceOutOfMemory("the device has no memory for even one token")
        images = {image.image_hash for item in batch.items for image in item.images}
        num_images = self._scheduler.max_images_per_step
        if images:
            num_images = max(min(len(images), num_images) // 2, 1)
        self._set(batch.num_tokens // 2, num_images)
        logger.warning(
            "out of memory: steps of %d tokens and %d images from now on",
            self._scheduler.max_num_batched_tokens,
            self._scheduler.max_images_per_step,
        )

    def note_success(self) -> None:
        """A step found the memory that it needed."""
        scheduler = self._scheduler
        self._num_good_steps += 1
        if self._num_good_steps >= RECOVERY_STEPS:
            self._set(2 * scheduler.max_num_batched_tokens, 2 * scheduler.max_images_per_step)

    def _set(self, num_tokens: int, num_images: int) -> None:
        self._scheduler.max_num_batched_tokens = min(num_tokens, self._max_tokens)
        self._scheduler.max_images_per_step = min(num_images, self._max_images)
        self._num_good_steps = 0
