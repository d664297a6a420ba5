"""How much a step may compute: tokens, images, and prompts beside running streams.

`StepLimits` are an engine's own: memory that runs out lowers them, and the time that steps take
moves the share of prompts. `StepBudget` is what one step has left while the scheduler plans it.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from engines.core.runner import DeviceOutOfMemory, ModelRunner, StepResult
from engines.core.sequence import Batch, ScheduledSequence, Sequence
from shared.protocol import Priority, SamplingParams

logger = logging.getLogger(__name__)

#: Steps without an accident after which twice as much is tried: another one then costs little.
RECOVERY_STEPS = 1000
#: A step with prompt tokens takes so many times what it takes without; twice at most is promised,
#: and steps vary.
MAX_SLOWDOWN = 1.6
#: Rows of scores that one step computes for logprobs of prompts: each is as long as the vocabulary.
MAX_SCORED_TOKENS = 512
_ASYNC_PREFILL_TOKENS = 512  #: of a step beside decodes, on a GPU
_SMALLEST_CHUNK = 3  # beside one stream four tokens, which CPU kernels compute together
_NUM_STREAMS = 8
_TRIES = 2
#: A step that was too long shrinks the next ones by a tenth, one that was not lets them grow: one
#: in a hundred is too long.
_SHRINKING, _GROWING = 0.9, 1.001
_SHARES = 0.2, 4.0  # of what was measured at the start, at least and at most
_LONGEST_RUN = 64  # steps with prompts, before one without shows what these are compared to
#: Weight of the newest step in what steps without prompts take, and of one that was not seen for
#: long; it may be noise.
_NEWEST, _FIRST_AGAIN = 0.1, 0.3


class StepBudget(msgspec.Struct):
    """What a step may still compute while it is planned."""

    num_tokens: int
    num_prefill_tokens: int  #: of these, for prompts
    max_images: int
    #: Seconds that images may take beside streams; None: as many as they need.
    max_vision_s: float | None = None
    encoded: set[str] = msgspec.field(
        default_factory=set
    )  #: hashes of the images that the step encodes
    num_scored_tokens: int = MAX_SCORED_TOKENS

    def fit(self, num_pending: int) -> int:
        """How many of a sequence's pending tokens fit; one alone is no prompt."""
        if num_pending > self.num_prefill_tokens and num_pending > 1:
            num_pending = self.num_prefill_tokens
        return num_pending if num_pending < self.num_tokens else self.num_tokens

    def take(self, num_new: int, num_pending: int, *, is_over_budget: bool = False) -> None:
        """Spend a share, which may be more than there is.

        One that is over the budget for images takes none of what others' prompts may have.
        """
        self.num_tokens = left if (left := self.num_tokens - num_new) > 0 else 0
        if num_pending > 1 and not is_over_budget:
            self.num_prefill_tokens = max(0, self.num_prefill_tokens - num_new)

    def take_scored(self, sequence: Sequence, start: int, num_new: int) -> int:
        """Limit a share whose prompt tokens get logprobs."""
        if start >= sequence.num_prompt_tokens - 1 or start + num_new < sequence.num_scored_tokens:
            return num_new
        if sequence.num_scored_tokens >= sequence.num_prompt_tokens:
            return num_new
        num_new = min(num_new, self.num_scored_tokens)
        self.num_scored_tokens -= num_new
        return num_new

    def take_image(self, image_hash: str) -> bool:
        """Whether the step encodes an image: one that it encodes already, or one more."""
        if image_hash not in self.encoded:
            if len(self.encoded) == self.max_images:
                return False
            self.encoded.add(image_hash)
        return True


class StepLimits:
    """How much any step of an engine may compute."""

    def __init__(
        self, max_tokens: int, max_images: int, prefill: "PrefillLimit | None" = None
    ) -> None:
        """Without a limit of prompts, streams wait as long as a step takes."""
        self._max_tokens = self._num_tokens = max_tokens
        self._max_images = self._num_images = max_images
        self._prefill = prefill
        self._num_good_steps = 0

    def budget(self, running: Mapping[str, Sequence]) -> StepBudget:
        """That of the next step beside these sequences."""
        num_tokens, prefill = self._num_tokens, self._prefill
        if prefill is None:
            return StepBudget(num_tokens, num_tokens, self._num_images)
        num_streams = sum(map(_is_stream, running.values()))
        num_prefill_tokens = prefill.beside(num_streams) if num_streams else num_tokens
        return StepBudget(num_tokens, num_prefill_tokens, self._num_images, prefill.spare_s)

    def halve(self, batch: Batch) -> None:
        """Let steps be half of this one. Raises: DeviceOutOfMemory if it was the smallest."""
        if batch.num_tokens == 1:
            raise DeviceOutOfMemory("the device has no memory for even one token")
        images = {image.image_hash for item in batch.items for image in item.images}
        num_images = self._num_images
        if images:
            num_images = max(min(len(images), num_images) // 2, 1)
        self._set(batch.num_tokens // 2, num_images)
        logger.warning(
            "out of memory: steps of %d tokens and %d images from now on",
            self._num_tokens,
            self._num_images,
        )

    def note(self, batch: Batch, result: StepResult, launch_s: float) -> None:
        """A step found the memory that it needed; launching it took so long."""
        self._num_good_steps += 1
        if self._num_good_steps >= RECOVERY_STEPS:
            self._set(2 * self._num_tokens, 2 * self._num_images)
        prefill = self._prefill
        if prefill is None or prefill.spare_s is None or result.vision_s or result.deferred:
            return
        if any(item.draft for item in batch.items):
            return
        streams = [item for item in batch.items if item.num_new_tokens == 1]
        if all(map(_is_smooth, streams)):
            num_streams = len(streams)
            prefill.note(num_streams, batch.num_tokens - num_streams, launch_s)

    def _set(self, num_tokens: int, num_images: int) -> None:
        self._num_tokens = min(num_tokens, self._max_tokens)
        self._num_images = min(num_images, self._max_images)
        self._num_good_steps = 0


@dataclass(slots=True)
class PrefillLimit:
    """How many prompt tokens a step may compute beside streams, so that these do not stutter.

    Measured once by the loader, then corrected by the times of steps: later contexts are longer,
    and the machine has other work at other times.
    """

    #: Beside one stream.
    num_tokens: int
    #: By what share more beside each further one.
    growth: float = 0.0
    #: What a step beside streams may take longer, which follows the times of steps. None: nothing
    #: is followed, because launching a step does not compute it.
    spare_s: float | None = None
    #: Whether `num_tokens` stays, whatever steps take.
    is_fixed: bool = False
    _share: float = field(default=1.0, compare=False)
    _alone_s: dict[int, float] = field(default_factory=dict, compare=False)  # by number of streams
    _num_mixed: Counter[int] = field(default_factory=Counter, compare=False)  # steps since, as many
    _stale: set[int] = field(default_factory=set, compare=False)

    def beside(self, num_streams: int) -> int:
        """Prompt tokens of the next step beside so many streams; now and then none.

        What streams alone take changes with contexts and with what else the machine does: it has to
        be seen.
        """
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
        """What a step without images took."""
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
    """Time steps of an idle runner: longer and longer chunks, until a step takes longer than it may.

    An asynchronous runner is not timed: its decode steps are CUDA graphs and its mixed steps are
    eager, so their ratio says nothing about the number of tokens.
    """
    if runner.runs_async:
        return PrefillLimit(min(_ASYNC_PREFILL_TOKENS, max_tokens), is_fixed=True)
    trial = Trial(runner)
    alone = trial.seconds(num_streams=1)
    spare_s = (MAX_SLOWDOWN - 1) * alone
    fast_chunk, fast_s, chunk = 0, alone, _SMALLEST_CHUNK
    while (seconds := trial.seconds(1, chunk)) <= MAX_SLOWDOWN * alone:
        fast_chunk, fast_s = chunk, seconds
        if chunk >= min(max_tokens, trial.longest_chunk):
            return PrefillLimit(max_tokens, spare_s=spare_s)
        chunk = min(2 * chunk + 1, max_tokens, trial.longest_chunk)
    share = (MAX_SLOWDOWN * alone - fast_s) / (seconds - fast_s)
    # A floor, for one noisy start must not slow all prompts of a worker's life to a token a step.
    num_tokens = max(_SMALLEST_CHUNK, int(fast_chunk + share * (chunk - fast_chunk)))
    num_streams = min(_NUM_STREAMS, trial.most_streams)
    if num_streams == 1:
        return PrefillLimit(num_tokens, spare_s=spare_s)
    growth = (trial.seconds(num_streams) / alone - 1) / (num_streams - 1)
    return PrefillLimit(num_tokens, max(0.0, growth), spare_s)


class Trial:
    """Steps made up for timing. Streams have the first blocks, one each; the chunk has the rest."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.most_streams = runner.num_blocks // 2
        free = (runner.num_blocks - self.most_streams) * runner.block_size
        self.longest_chunk = min(free, runner.max_model_len) - 1

    def seconds(self, num_streams: int, num_chunk_tokens: int = 0, tries: int = _TRIES) -> float:
        """The best of a few tries, after one that is not counted."""
        items = [self._share(place, [place], 1) for place in range(num_streams)]
        if num_chunk_tokens:
            blocks = list(range(self.most_streams, self._runner.num_blocks))
            items.append(self._share(num_streams, blocks, num_chunk_tokens))
        times = []
        for _ in range(tries + 1):
            started = time.perf_counter()
            self._runner.run(Batch(items))
            times.append(time.perf_counter() - started)
        for item in items:
            self._runner.release(item.sequence.request_id)
        return min(times[1:])

    def _share(self, place: int, block_ids: list[int], num_new: int) -> ScheduledSequence:
        sampling = SamplingParams(temperature=0)
        sequence = Sequence(f"trial-{place}", [0] * num_new, num_new, sampling)
        sequence.block_ids = block_ids
        return ScheduledSequence(sequence, num_new)


def _is_stream(sequence: Sequence) -> bool:
    """Whether somebody waits for its next token; nobody does for batch work."""
    return sequence.num_pending_tokens == 1 and sequence.priority is Priority.INTERACTIVE


def _is_smooth(item: ScheduledSequence) -> bool:
    """The same of a share whose step is planned."""
    return item.samples and item.sequence.priority is Priority.INTERACTIVE
