"""A request inside an engine, and the batch of them that one step computes.

Used by scheduler, block manager and runners.
"""

from collections.abc import Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from engines.base import Adapter
from engines.core.constraint import Constraint
from engines.core.request import EngineRequest, ImageInput, Positions
from shared.protocol import FinishReason, Priority, SamplingParams

if TYPE_CHECKING:
    from engines.core.speculation import History

NOT_SCORED = 1 << 62  #: more tokens than any prompt has: no logprobs are wanted
#: Newcomers that overtake a waiting batch sequence before it counts as one of them.
MAX_OVERTAKES = 32


class SequenceStatus(Enum):
    """WAITING holds no blocks; RUNNING may; FINISHED never again."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence(Struct, eq=False):
    """Tokens of one request and how many of them are computed.

    There is no prefill flag: `num_computed_tokens` catches up with `num_tokens`, in one step or
    many, after a prefix hit, a preemption or a takeover alike.
    """

    request_id: str
    token_ids: list[int]  #: prompt, then output; the only token list
    num_prompt_tokens: int
    sampling: SamplingParams
    images: tuple[ImageInput, ...] = ()
    cache_salt: str = ""
    priority: Priority = Priority.INTERACTIVE
    prompt_positions: Positions = ()  #: rotary ones; empty: 0, 1, 2 ...
    adapter: Adapter | None = None
    constraint: Constraint | None = None
    max_output_tokens: int = 1
    eos_token_ids: tuple[int, ...] = ()  #: not sampled before `sampling.min_tokens`
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0  #: tokens whose keys and values are in the cache
    num_scored_tokens: int = NOT_SCORED  #: prompt tokens whose logprobs are reported
    num_cached_tokens: int = 0  #: prompt tokens that the prefix cache gave at first scheduling
    num_restored_tokens: int = 0  #: output tokens that an earlier attempt had emitted
    block_ids: list[int] = field(default_factory=list)  #: the block table
    block_hashes: list[bytes] = field(default_factory=list)  #: of its full blocks, as far as known
    num_published_blocks: int = 0  #: leading blocks that the prefix cache knows
    num_preemptions: int = 0
    num_overtakes: int = 0  #: how often a newcomer was started before it
    finish_reason: FinishReason | None = None
    history: "History | None" = None  #: what drafts are made of; none where nothing is guessed
    token_counts: Any = None  #: the sampler's, where tokens have penalties
    _shift: int = 0  #: from a later token's place to its rotary position

    def __post_init__(self) -> None:
        rows = self.prompt_positions
        # what follows the prompt has one position in all rows, behind the largest of the prompt
        self._shift = max(map(max, rows)) + 1 - self.num_prompt_tokens if rows else 0

    @classmethod
    def from_request(
        cls, request: EngineRequest, max_output_tokens: int, eos_token_ids: Iterable[int] = ()
    ) -> "Sequence":
        """The sequence of a request, with the output of earlier attempts appended to its prompt."""
        salt, adapter = request.cache_salt, request.adapter
        if adapter is not None:  # keys and values depend on it too
            salt = f"{salt}\0{adapter.digest}"
        # an attempt that emitted a token had reported them all
        wants_scores = (
            request.sampling.num_prompt_logprobs is not None and not request.output_token_ids
        )
        return cls(
            request_id=request.request_id,
            token_ids=[*request.prompt_token_ids, *request.output_token_ids],
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling=request.sampling,
            images=request.images,
            cache_salt=salt,
            priority=request.priority,
            prompt_positions=request.positions,
            adapter=adapter,
            constraint=request.constraint and request.constraint.begin(),
            max_output_tokens=max_output_tokens,
            eos_token_ids=(*eos_token_ids, *request.sampling.stop_token_ids)
            if request.sampling.min_tokens
            else (),
            num_scored_tokens=0 if wants_scores else NOT_SCORED,
            num_restored_tokens=len(request.output_token_ids),
        )

    def positions(self, start: int, end: int) -> list[list[int]]:
        """Rotary positions from `start` to before `end`, by row; one row where all are alike."""
        if not self.prompt_positions:
            return [list(range(start, end))]
        split, shift = self.num_prompt_tokens, self._shift
        later = range(max(start, split) + shift, max(end, split) + shift)
        return [[*row[start:end], *later] for row in self.prompt_positions]

    @property
    def is_preemptible(self) -> bool:
        """Whether interactive sequences overtake it: batch work is, until enough have."""
        return self.priority is Priority.BATCH and self.num_overtakes < MAX_OVERTAKES

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, those of earlier attempts included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """Leading tokens that a prefix hit may give: all but those whose scores are needed."""
        if self.num_scored_tokens < self.num_prompt_tokens:
            return max(self.num_scored_tokens - 1, 0)
        return len(self.token_ids) - 1

    @property
    def num_pending_tokens(self) -> int:
        """Tokens still to compute before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens


class ScheduledSequence:
    """One sequence's share of a step: the tokens from `start` to before `end`. Immutable.

    Blocks for all of them are in `sequence.block_ids` already. When `samples` is true the step
    samples a token.
    """

    __slots__ = (
        "draft",
        "end",
        "in_flight_index",
        "num_new_tokens",
        "samples",
        "sequence",
        "start",
    )

    def __init__(
        self,
        sequence: Sequence,
        num_new_tokens: int,
        in_flight_index: int | None = None,
        draft: tuple[int, ...] = (),
    ) -> None:
        """What the sequence has yet to compute, or, with an `in_flight_index`, its one next token.

        That token is sampled by the step in flight, for its share of this index. A `draft` is what
        may come behind the sequence's end; it is among the new tokens.
        """
        self.sequence = sequence
        self.draft = draft
        self.num_new_tokens = num_new_tokens
        self.in_flight_index = in_flight_index
        num_tokens = len(sequence.token_ids)
        self.start = start = sequence.num_computed_tokens if in_flight_index is None else num_tokens
        self.end = end = start + num_new_tokens
        #: whether this share reaches the sequence's end, so that the next token can be sampled
        self.samples = end >= num_tokens

    @property
    def output_position(self) -> int:
        """How many output tokens stand before the one that is sampled."""
        return self.end - len(self.draft) - self.sequence.num_prompt_tokens

    @property
    def scored(self) -> range:
        """Prompt tokens whose logprobs this share computes, from the scores of the token before each."""
        sequence = self.sequence
        num_scored = sequence.num_scored_tokens
        first = max(self.start + 1, num_scored) if num_scored else 0  # the first token has no score
        return range(first, min(self.end + 1, sequence.num_prompt_tokens))

    @property
    def token_ids(self) -> list[int]:
        """The tokens that it computes, where they are known."""
        known = self.sequence.token_ids[self.start : self.end]
        return [*known, *self.draft] if self.draft else known

    @property
    def images(self) -> list[ImageInput]:
        """The images whose features this share reads, in order of their offsets."""
        start, end = self.start, self.end
        return [
            image
            for image in self.sequence.images
            if image.offset < end and image.offset + image.num_tokens > start
        ]


class Batch(Struct):
    """What one step computes: prefill chunks and decode tokens mixed freely."""

    items: list[ScheduledSequence] = field(default_factory=list)
    #: Seconds that encoding images may take beside streams; None: as many as it needs.
    max_vision_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens in the whole batch."""
        return sum(item.num_new_tokens for item in self.items)
