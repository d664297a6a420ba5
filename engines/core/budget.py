"""Token and image budgets of a step, and the smaller prefill budget of a step that also decodes.

An engine has one `StepLimits`: out-of-memory errors lower the limits, and step times adjust the prefill limit.
`StepBudget` is the remaining part of these limits while the scheduler plans one step.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from engines.core.runner import DeviceOutOfMemory, ModelRunner, SequenceFailure, StepResult
from engines.core.sequence import Batch, ScheduledSequence, Sequence
from shared.protocol import SamplingParams

logger = logging.getLogger(__name__)

TOO_LARGE = "The prompt needs more memory than the model's device has: send a shorter one."
#: Steps without an out-of-memory error after which the limits are doubled.
RECOVERY_STEPS = 1000
#: Target duration of a step with prompt tokens, relative to one without; below the acceptable 2, because times vary.
MAX_SLOWDOWN = 1.6
#: Maximum of prompt tokens with logprobs per step. Each needs one logit per token of the vocabulary.
MAX_SCORED_TOKENS = 512
_ASYNC_PREFILL_TOKENS = 512  #: prompt tokens of a step that also decodes, on a GPU
_SMALLEST_CHUNK = 3  # with one decode token, these fill a group of four rows of the CPU kernels
_NUM_STREAMS = 8
_TRIES = 2
#: Factors of the limit after a step that was too long, and after a shorter one that used the whole limit. They balance
#: if 1 % of these steps are too long.
_SHRINKING, _GROWING = 0.9, 1.001
_SHARES = 0.2, 4.0  # bounds of the limit, as multiples of the initial measurement
_LONGEST_RUN = 64  # steps with prompt tokens after which a step without them is measured again
#: Weight of the newest step in the average time of steps without prompts; the second weight applies after a long gap.
_NEWEST, _FIRST_AGAIN = 0.1, 0.3


class StepBudget(msgspec.Struct):
    """The remaining budget of a step while it is planned."""

    num_tokens: int
    num_prefill_tokens: int  #: the part of `num_tokens` that prefill may use
    max_images: int
    #: Time limit of image encoding while other sequences decode; None: no limit.
    max_vision_s: float | None = None
    encoded: set[str] = set()  #: hashes of the images that the step encodes
    num_scored_tokens: int = MAX_SCORED_TOKENS

    def fit(self, num_pending: int) -> int:
        """Number of a sequence's pending tokens that fit. A single pending token does not count as prefill."""
        if num_pending > self.num_prefill_tokens and num_pending > 1:
            num_pending = self.num_prefill_tokens
        return num_pending if num_pending < self.num_tokens else self.num_tokens

    def take(self, num_new: int, num_pending: int, *, is_over_budget: bool = False) -> None:
        """Spend tokens, possibly more than are left. Requests in `StepResult.over_budget` use no prefill budget."""
        self.num_tokens = left if (left := self.num_tokens - num_new) > 0 else 0
        if num_pending > 1 and not is_over_budget:
            self.num_prefill_tokens = max(0, self.num_prefill_tokens - num_new)

    def take_scored(self, sequence: Sequence, start: int, num_new: int) -> int:
        """Limit `num_new` to the prompt tokens whose logprobs this step can still compute."""
        if start >= sequence.num_prompt_tokens - 1 or start + num_new < sequence.num_scored_tokens:
            return num_new
        if sequence.num_scored_tokens >= sequence.num_prompt_tokens:
            return num_new
        num_new = min(num_new, self.num_scored_tokens)
        self.num_scored_tokens -= num_new
        return num_new

    def take_image(self, image_hash: str) -> bool:
        """Reserve the encoding of an image; False if the step already encodes `max_images`."""
        if image_hash not in self.encoded:
            if len(self.encoded) == self.max_images:
                return False
            self.encoded.add(image_hash)
        return True


class StepLimits:
    def __init__(
        self, max_tokens: int, max_images: int, prefill: "PrefillLimit | None" = None
    ) -> None:
        """`prefill` limits the prompt tokens of steps that also decode; None: no limit."""
        self._max_tokens = self._num_tokens = max_tokens
        self._max_images = self._num_images = max_images
        self._prefill = prefill
        self._num_good_steps = 0

    def budget(self, running: Mapping[str, Sequence]) -> StepBudget:
        num_tokens, prefill = self._num_tokens, self._prefill
        if prefill is None:
            return StepBudget(num_tokens, num_tokens, self._num_images)
        streams = [sequence for sequence in running.values() if sequence.is_smooth]
        num_streams = sum(sequence.num_pending_tokens == 1 for sequence in streams)
        num_prefill_tokens = prefill.beside(num_streams) if num_streams else num_tokens
        return StepBudget(num_tokens, num_prefill_tokens, self._num_images, prefill.spare_s)

    def halve(self, batch: Batch) -> None:
        """Limit steps to half of this batch, or of the present limit if the batch exceeds it.

        Raises: DeviceOutOfMemory if the batch had one token; SequenceFailure if the limit is one token already and the
        only sequence has an image or prompt with bidirectional attention, which cannot be split into several steps.
        """
        if batch.num_tokens == 1:
            raise DeviceOutOfMemory("no memory for a step of one token: lower kv_cache_bytes")
        if len(batch.items) == 1 and self._num_tokens == 1:
            self._set(self._max_tokens, self._max_images)
            raise SequenceFailure(batch.items[0].sequence.request_id, TOO_LARGE)
        images = {image.image_hash for item in batch.items for image in item.images}
        num_images = self._num_images
        if images:
            num_images = max(min(len(images), num_images) // 2, 1)
        self._set(max(min(batch.num_tokens, self._num_tokens) // 2, 1), num_images)
        logger.warning(
            "out of memory: steps are limited to %d tokens and %d images from now on",
            self._num_tokens,
            self._num_images,
        )

    def note(self, batch: Batch, result: StepResult, launch_s: float) -> None:
        """Record a successful step, whose launch took `launch_s`."""
        self._num_good_steps += 1
        if self._num_good_steps >= RECOVERY_STEPS:
            self._set(2 * self._num_tokens, 2 * self._num_images)
        prefill = self._prefill
        if prefill is None or prefill.spare_s is None or result.vision_s or result.num_computed:
            return
        if any(item.draft for item in batch.items):
            return
        streams = [item for item in batch.items if item.num_new_tokens == 1]
        if all(s.samples and s.sequence.is_smooth for s in streams):
            num_streams = len(streams)
            prefill.note(num_streams, batch.num_tokens - num_streams, launch_s)

    def _set(self, num_tokens: int, num_images: int) -> None:
        self._num_tokens = min(num_tokens, self._max_tokens)
        self._num_images = min(num_images, self._max_images)
        self._num_good_steps = 0


@dataclass(slots=True)
class PrefillLimit:
    """Limit of the prompt tokens of a step that also decodes.

    Measured once by the loader, then adjusted by step times, because contexts grow and the load of the machine varies.
    """

    #: The limit while one sequence decodes.
    num_tokens: int
    #: Relative increase of the limit per further decoding sequence.
    growth: float = 0.0
    #: Seconds that encoding images may add to a step that also decodes, adjusted by step times. None: no limit, because
    #: an asynchronous runner returns before the step is computed.
    spare_s: float | None = None
    #: Whether `num_tokens` is configured, so that step times do not adjust it.
    is_fixed: bool = False
    _share: float = field(default=1.0, compare=False)
    _alone_s: dict[int, float] = field(default_factory=dict, compare=False)  # by batch size
    # by batch size: steps since the last step without prompt tokens
    _num_mixed: Counter[int] = field(default_factory=Counter, compare=False)
    _stale: set[int] = field(default_factory=set, compare=False)

    def beside(self, num_streams: int) -> int:
        """The limit of the next step; periodically 0, to time a step without prompt tokens."""
        if self.is_fixed:
            return self.num_tokens
        if self._num_mixed[num_streams] >= _LONGEST_RUN:
            self._num_mixed[num_streams] = 0
            self._stale.add(num_streams)
            return 0
        return self._most_beside(num_streams)

    def _most_beside(self, num_streams: int) -> int:
        num_tokens = int(self.num_tokens * (1 + self.growth * (num_streams - 1)) * self._share)
        return max(min(_SMALLEST_CHUNK, self.num_tokens), num_tokens)

    def note(self, num_streams: int, num_prompt_tokens: int, seconds: float) -> None:
        """Adjust the limit to the time of a step without images."""
        if num_prompt_tokens == 0:
            self._note_alone(num_streams, seconds)
            return
        self._num_mixed[num_streams] += 1
        alone_s = self._alone_s.get(num_streams)
        if alone_s is None:
            return
        if seconds > MAX_SLOWDOWN * alone_s:
            self._share = max(_SHARES[0], self._share * _SHRINKING)
        elif num_prompt_tokens >= self._most_beside(num_streams):
            self._share = min(_SHARES[1], self._share * _GROWING)

    def _note_alone(self, num_streams: int, seconds: float) -> None:
        alone_s = self._alone_s.get(num_streams)
        if alone_s is not None:
            weight = _FIRST_AGAIN if num_streams in self._stale else _NEWEST
            seconds = weight * seconds + (1 - weight) * alone_s
        self._stale.discard(num_streams)
        self._num_mixed[num_streams] = 0
        self._alone_s[num_streams] = seconds
        if self.spare_s is not None:
            self.spare_s = (MAX_SLOWDOWN - 1) * seconds


def measure_prefill_limit(runner: ModelRunner, max_tokens: int) -> PrefillLimit:
    """Time steps of an idle runner with growing chunks until one exceeds the target.

    An asynchronous runner is not timed. Its decode steps are CUDA graphs and its mixed steps are
    eager, so the ratio of their times does not show the cost of prompt tokens.
    """
    if runner.runs_async:
        return PrefillLimit(min(_ASYNC_PREFILL_TOKENS, max_tokens), is_fixed=True)
    trial = Trial(runner)
    alone = trial.seconds(num_streams=1)
    spare_s = (MAX_SLOWDOWN - 1) * alone
    if trial.longest_chunk < _SMALLEST_CHUNK:
        return PrefillLimit(max_tokens, spare_s=spare_s)
    fast_chunk, fast_s, chunk = 0, alone, _SMALLEST_CHUNK
    while (seconds := trial.seconds(1, chunk)) <= MAX_SLOWDOWN * alone:
        fast_chunk, fast_s = chunk, seconds
        if chunk >= min(max_tokens, trial.longest_chunk):
            return PrefillLimit(max_tokens, spare_s=spare_s)
        chunk = min(2 * chunk + 1, max_tokens, trial.longest_chunk)
    share = (MAX_SLOWDOWN * alone - fast_s) / (seconds - fast_s)
    # a lower bound, so that a noisy start does not slow down all prompts
    num_tokens = max(_SMALLEST_CHUNK, int(fast_chunk + share * (chunk - fast_chunk)))
    num_streams = min(_NUM_STREAMS, trial.most_streams)
    if num_streams == 1:
        return PrefillLimit(num_tokens, spare_s=spare_s)
    growth = (trial.seconds(num_streams) / alone - 1) / (num_streams - 1)
    return PrefillLimit(num_tokens, max(0.0, growth), spare_s)


class Trial:
    """Synthetic steps for timing. Each decoding sequence uses one block, the prefill chunk the other blocks."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.most_streams = runner.num_blocks // 2
        free = (runner.num_blocks - self.most_streams) * runner.block_size
        self.longest_chunk = min(free, runner.max_model_len) - 1

    def seconds(self, num_streams: int, num_chunk_tokens: int = 0, tries: int = _TRIES) -> float:
        """Shortest of `tries` times after a warm-up."""
        items = [self._share(place, [place], 1) for place in range(num_streams)]
        if num_chunk_tokens:
            blocks = list(range(self.most_streams, self._runner.num_blocks))
            items.append(self._share(num_streams, blocks, num_chunk_tokens))
        times = []
        for _ in range(tries + 1):
            started = time.perf_counter()
            self._runner.launch(Batch(items)).wait()
            times.append(time.perf_counter() - started)
        for item in items:
            self._runner.release(item.sequence.request_id)
        return min(times[1:])

    def _share(self, place: int, block_ids: list[int], num_new: int) -> ScheduledSequence:
        sampling = SamplingParams(temperature=0)
        sequence = Sequence(f"trial-{place}", [0] * num_new, num_new, sampling)
        sequence.block_ids = block_ids
        return ScheduledSequence(sequence, num_new)
