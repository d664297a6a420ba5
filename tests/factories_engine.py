"""Objects of the engine core with defaults, for tests of one of their properties."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from engines.base import Engine, EngineOutput
from engines.core.blocks import BlockManager
from engines.core.budget import PrefillLimit, StepLimits
from engines.core.engine import BatchingEngine
from engines.core.runner import StepResult, TokenChoice
from engines.core.scheduler import Scheduler
from engines.core.sequence import Batch, EngineRequest, ImageInput, ScheduledSequence, Sequence
from engines.mock.engine import (
    IMAGE_ID,
    MockEngineSettings,
    MockProcessor,
    MockRunner,
    MockSettings,
    MockStep,
)
from shared.protocol import FinishReason, Priority, PromptLogprob, SamplingParams, Usage
from tests.integrity import check_scheduler

EOS_ID = 9999


class Clock:
    """Time that passes only during `sleep`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_image(offset: int = 0, num_tokens: int = 8, image_hash: str = "a" * 64) -> ImageInput:
    return ImageInput(offset, num_tokens, image_hash, pixels=(1, 1))


def make_request(
    request_id: str = "r0",
    prompt: str | list[int] = "hello",
    images: tuple[ImageInput, ...] = (),
    output_token_ids: tuple[int, ...] = (),
    cache_salt: str = "",
    priority: Priority = Priority.INTERACTIVE,
    **sampling: object,
) -> EngineRequest:
    """Returns a request; image slots replace tokens at the positions of images."""
    token_ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    for image in images:
        token_ids[image.offset : image.offset + image.num_tokens] = [IMAGE_ID] * image.num_tokens
    return EngineRequest(
        request_id,
        token_ids,
        SamplingParams(**{"temperature": 0.0, **sampling}),
        images,
        output_token_ids,
        cache_salt,
        priority,
    )


def make_sequence(
    num_tokens: int = 10,
    request_id: str = "s0",
    token_ids: list[int] | None = None,
    max_output_tokens: int = 100,
    **fields: object,
) -> Sequence:
    if token_ids is None:
        token_ids = list(range(1, num_tokens + 1))
    return Sequence(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(),
        max_output_tokens=max_output_tokens,
        **fields,
    )


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_images_per_step: int = 8,
    enable_prefix_cache: bool = True,
    prefill_limit: PrefillLimit | None = None,
    binds_prompts: bool = False,
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, block_size, enable_prefix_cache=enable_prefix_cache),
        StepLimits(max_num_batched_tokens, max_images_per_step, prefill_limit),
        max_num_seqs=max_num_seqs,
        eos_token_ids={EOS_ID},
        binds_prompts=binds_prompts,
    )


def shares(batch: Batch) -> dict[str, int]:
    """Returns the number of new tokens by sequence."""
    return {item.sequence.request_id: item.num_new_tokens for item in batch.items}


def run_step(
    scheduler: Scheduler,
    token_id: int = 7,
    num_computed: dict[str, int] | None = None,
    over_budget: frozenset[str] = frozenset(),
) -> Batch:
    """Runs a step as if a model had sampled `token_id` for all requests that are not in `num_computed`."""
    batch = scheduler.schedule()
    fewer = num_computed or {}
    choices = [
        TokenChoice(token_id) if item.samples and item.sequence.request_id not in fewer else None
        for item in batch.items
    ]
    scheduler.update(batch, StepResult(choices, num_computed=fewer, over_budget=over_budget))
    check_scheduler(scheduler)
    return batch


class SumMatcher:
    """A grammar that allows a token if it equals the sum of all earlier tokens, modulo 3."""

    def __init__(self, vocab_size: int, total: int = 0) -> None:
        self.vocab_size = vocab_size
        self.total = total
        self.is_lost = False

    def deep_copy(self) -> "SumMatcher":
        return SumMatcher(self.vocab_size, self.total)

    def consume_tokens(self, sampled_tokens: list[int]) -> bool:
        for token_id in sampled_tokens:
            self.is_lost |= token_id % 3 != self.total % 3
            self.total += token_id + 1
        return not self.is_lost

    def compute_bitmask(self) -> bytes:
        bits = sum(1 << t for t in range(self.vocab_size) if t % 3 == self.total % 3)
        return bits.to_bytes(-(-self.vocab_size // 32) * 4, "little")

    def is_error(self) -> bool:
        return self.is_lost

    def get_error(self) -> str:
        return "the token doesn't satisfy the grammar" if self.is_lost else ""


class CheckingRunner(MockRunner):
    """A mock with a KV pool of notes, which reads all of them before it samples a token.

    A note contains what its slot was computed from. Any error with blocks, prefixes, chunks or preemption makes a
    sequence read the note of another one.
    """

    def __init__(self, settings: MockEngineSettings) -> None:
        super().__init__(settings)
        self.notes: list[object] = [None] * (self.num_blocks * self.block_size)
        self.find_lent: Callable[[], set[int]] | None = None  # returns the blocks in use
        self.launched: list[Batch] = []
        self._last: CheckingStep | None = None
        self.failures: list[Exception] = []  # raised one by one instead of computing
        self.known_requests: set[str] = set()  # seen and not yet released

    def launch(self, batch: Batch) -> "CheckingStep":
        assert batch.items
        self.launched.append(batch)
        self.known_requests |= {item.sequence.request_id for item in batch.items}
        is_behind = any(item.in_flight_index is not None for item in batch.items)
        before = self._last if is_behind else None
        sampled = before.step.result.choices if before else []
        shares = [CheckedShare.create(item, sampled, self.block_size) for item in batch.items]
        self._last = CheckingStep(self, shares, super().launch(batch), before)
        return self._last

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self.known_requests.discard(request_id)


@dataclass
class CheckedShare:
    """The reads and writes of a sequence in a step, copied at launch time."""

    sequence: Sequence
    start: int
    slots: list[int]
    notes: list[object]

    @classmethod
    def create(
        cls, item: ScheduledSequence, sampled: list[TokenChoice | None], block_size: int
    ) -> "CheckedShare":
        sequence = item.sequence
        token_ids = list(sequence.token_ids[: item.end])
        if item.in_flight_index is not None:
            choice = sampled[item.in_flight_index]
            assert choice is not None
            token_ids.append(choice.token_id)
        positions = range(item.end)
        table = sequence.block_ids
        slots = [table[p // block_size] * block_size + p % block_size for p in positions]
        return cls(sequence, item.start, slots, [note(sequence, p, token_ids) for p in positions])


@dataclass
class CheckingStep:
    """A step that computes as late as possible, when it is waited for. After a failed step, it computes nonsense."""

    can_be_followed: ClassVar[bool] = True
    runner: CheckingRunner
    shares: list[CheckedShare]
    step: MockStep
    before: "CheckingStep | None"
    has_failed: bool = False

    def wait(self) -> StepResult:
        try:
            self.compute()
        except Exception:
            self.has_failed = True
            raise
        return self.step.wait()

    def compute(self) -> None:
        if self.runner.find_lent is not None:
            lent = self.runner.find_lent()
            for share in self.shares:
                written = {slot // self.runner.block_size for slot in share.slots[share.start :]}
                assert written <= lent, "a step writes to a block that is free"
        if self.runner.failures:
            raise self.runner.failures.pop()
        is_nonsense = self.before is not None and self.before.has_failed
        self.before = None
        notes = self.runner.notes
        for share in self.shares:
            for position in range(share.start, len(share.notes)):
                notes[share.slots[position]] = None if is_nonsense else share.notes[position]
        for share in self.shares:
            assert is_nonsense or [notes[slot] for slot in share.slots] == share.notes


def note(sequence: Sequence, position: int, token_ids: list[int]) -> object:
    for image in sequence.images:
        if image.offset <= position < image.offset + image.num_tokens:
            return (sequence.cache_salt, position, image.image_hash, position - image.offset)
    return (sequence.cache_salt, position, token_ids[position])


def make_mock(**changes: object) -> MockSettings:
    """Returns a mock that takes no time, unless changed."""
    instant = {"vision_s": 0, "prefill_s_per_token": 0, "decode_s": 0}
    return MockSettings(**{**instant, **changes})


def make_engine(
    num_output_tokens: int = 12, mock: MockSettings | None = None, **config: object
) -> BatchingEngine:
    """Returns the mock engine with a pool of notes."""
    mock = mock or make_mock(num_output_tokens=num_output_tokens, tokens_per_image=8)
    settings = MockEngineSettings(**{"block_size": 4, "num_kv_blocks": 256, "mock": mock, **config})
    runner = CheckingRunner(settings)
    engine = BatchingEngine(runner, MockProcessor(mock.tokens_per_image), settings)
    blocks = engine.blocks._blocks
    runner.find_lent = lambda: {place for place, block in enumerate(blocks) if block.ref_count}
    return engine


@dataclass
class Transcript:
    """The outputs of one request, assembled as by a client, with checks of their order."""

    next_index: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    first_usage: Usage | None = None
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    last: EngineOutput | None = None

    def append(self, output: EngineOutput) -> None:
        assert self.last is None, "an output after the last"
        assert output.index == self.next_index
        if self.first_usage is None:
            assert output.usage is not None
            self.first_usage = output.usage
        assert not (output.prompt_logprobs and self.next_index), "the prompt's come first"
        self.prompt_logprobs += output.prompt_logprobs
        self.logprobs += [entry.chosen.logprob for entry in output.logprobs]
        self.next_index += len(output.token_ids) + output.num_without_id
        self.token_ids += output.token_ids
        self.text += output.text
        self.reasoning += output.reasoning
        if output.finish_reason is not None or output.error is not None:
            assert output.usage is not None
            assert output.timings is not None
            self.last = output

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.last.finish_reason if self.last else None


def run_all(engine: Engine, *requests: EngineRequest) -> dict[str, Transcript]:
    """Adds the requests together and steps until none is left."""
    transcripts = {r.request_id: Transcript(len(r.output_token_ids)) for r in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for output in engine.step():
            transcripts[output.request_id].append(output)
        if isinstance(engine, BatchingEngine):
            check_scheduler(engine.scheduler)
    return transcripts


def answer_alone(request: EngineRequest, num_output_tokens: int = 12) -> Transcript:
    """Returns the answer of a request in its own engine with enough blocks."""
    engine = make_engine(num_output_tokens, enable_prefix_cache=False)
    return run_all(engine, request)[request.request_id]
