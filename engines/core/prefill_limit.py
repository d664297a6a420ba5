"""How many prompt tokens a step may compute beside running streams, so that these do not stutter.

Measured once by the loader, followed by the scheduler, corrected by the runner's own steps: later contexts are longer,
and the machine has other work at other times. It knows runners by their protocol alone.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

from engines.core.runner import ModelRunner
from engines.core.sequence import Batch, ScheduledSequence, Sequence
from shared.protocol import SamplingParams

#: A step with prompt tokens takes so many times what it takes without; twice at most is promised, and steps vary.
MAX_SLOWDOWN = 1.6
_SMALLEST_CHUNK = 3  # beside one stream four tokens, which CPU kernels compute together
_NUM_STREAMS = 8
_TRIES = 2
#: A step that was too long shrinks the next ones by a tenth, one that was not lets them grow: one in a hundred is too long.
_SHRINKING, _GROWING = 0.9, 1.001
_SHARES = 0.2, 4.0  # of what was measured at the start, at least and at most
_LONGEST_RUN = 64  # steps with prompts, before one without shows what these are compared to
#: Weight of the newest step in what steps without prompts take, and of one that was not seen for long; it may be noise.
_NEWEST, _FIRST_AGAIN = 0.1, 0.3


@dataclass(slots=True)
class PrefillLimit:
    """Prompt tokens beside one stream, and by what share more beside each further one."""

    num_tokens: int
    growth: float = 0.0
    spare_s: float | None = None  #: what a step beside streams may take longer
    _share: float = field(default=1.0, compare=False)
    _alone_s: dict[int, float] = field(default_factory=dict, compare=False)  # by number of streams
    _num_mixed: Counter[int] = field(default_factory=Counter, compare=False)  # steps since, as many
    _stale: set[int] = field(default_factory=set, compare=False)

    def beside(self, num_streams: int) -> int:
        """Prompt tokens of the next step, which draws so many tokens; none now and then, while prompts never end.

        What streams alone take changes with contexts and with what else the machine does: it has to be seen.
        """
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
    """Time steps of the runner, whose keys and values are nobody's yet.

    Longer and longer chunks stand beside one stream, until a step takes longer than it may.
    """
    trial = _Trial(runner)
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


class _Trial:
    """Steps made up for timing. Streams have the first blocks, one each; the chunk has the rest."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.most_streams = runner.num_blocks // 2
        free = (runner.num_blocks - self.most_streams) * runner.block_size
        self.longest_chunk = min(free, runner.max_model_len) - 1

    def seconds(self, num_streams: int, num_chunk_tokens: int = 0) -> float:
        """The best of a few tries, after one that is not counted."""
        items = [self._share(place, [place], 1) for place in range(num_streams)]
        if num_chunk_tokens:
            blocks = list(range(self.most_streams, self._runner.num_blocks))
            items.append(self._share(num_streams, blocks, num_chunk_tokens))
        times = []
        for _ in range(_TRIES + 1):
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
