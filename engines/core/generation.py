"""A request inside the engine, from `add` to its last output.

Used by the engine alone; knows no tensors and no queues. Clock readings are `time.perf_counter`.
"""

from dataclasses import dataclass

from engines.core.sequence import Sequence
from engines.text.detokenizer import Detokenizer
from shared.protocol import StageTimings, Usage


@dataclass(slots=True)
class Generation:
    """A sequence, its text and its clock readings."""

    sequence: Sequence
    detokenizer: Detokenizer
    added_at: float
    scheduled_at: float | None = None
    first_token_at: float | None = None
    vision_s: float = 0.0
    is_announced: bool = False  #: whether an output has carried its usage

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        sequence = self.sequence
        return Usage(
            num_prompt_tokens=sequence.num_prompt_tokens,
            num_output_tokens=sequence.num_output_tokens,
            num_image_tokens=sum(image.num_tokens for image in sequence.images),
            num_cached_tokens=sequence.num_cached_tokens,
        )

    def timings(self, now: float) -> StageTimings:
        """The stages of a request that ends now; they add up to its time in the engine."""
        scheduled_at = now if self.scheduled_at is None else self.scheduled_at
        first_token_at = now if self.first_token_at is None else self.first_token_at
        return StageTimings(
            queue_s=scheduled_at - self.added_at,
            vision_s=self.vision_s,
            prefill_s=max(first_token_at - scheduled_at - self.vision_s, 0.0),
            decode_s=now - first_token_at,
        )
