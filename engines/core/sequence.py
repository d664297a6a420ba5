"""A request in an engine: its prompt of token ids and images, its state, and the batch of one step."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from engines.base import Adapter
from engines.core.constraint import Constraint
from shared.protocol import FinishReason, Priority, SamplingParams, TemplateOption

if TYPE_CHECKING:
    from engines.text.tools import ToolFormat

NO_OPTIONS: Mapping[str, TemplateOption] = {}


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image in a prompt: `num_tokens` tokens at `offset`. Image features replace the placeholder tokens (slots).

    `image_hash` identifies the image and its processing in every cache; `pixels` is the output of the runner's image
    processor. The image's other tokens, such as line breaks, are embedded as text.
    """

    offset: int
    num_tokens: int
    image_hash: str
    pixels: Any
    slots: tuple[tuple[int, int], ...] = ()
    """Runs of slots as (start, stop) within the image. Empty: all tokens are slots."""
    #: Whether attention within a run of slots is bidirectional, so that one step computes the run.
    is_whole: bool = False
    num_frames: int = 0  #: frames of a video; 0: not a video
    kind: str = "image"

    @property
    def slot_runs(self) -> tuple[tuple[int, int], ...]:
        return self.slots or ((0, self.num_tokens),)

    @property
    def num_slots(self) -> int:
        """Number of feature rows."""
        return sum(stop - start for start, stop in self.slot_runs)


#: Rotary positions of a prompt: R rows with one number per token. Empty: 0, 1, 2 ... in every row.
Positions = tuple[Items[int], ...]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prepared request. Output tokens of an earlier attempt are continued."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    images: tuple[ImageInput, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    priority: Priority = Priority.INTERACTIVE
    is_streamed: bool = True
    is_thinking: bool = False  #: the prompt ends within the reasoning
    is_raw: bool = False  #: reasoning is not separated from the text
    positions: Positions = ()  #: positions of the prompt; output continues after the largest
    adapter: Adapter | None = None
    tool_format: "ToolFormat | None" = None  #: set if the answer may call functions
    constraint: Constraint | None = None  #: grammar of the answer, at its start


class Prompt(Struct, frozen=True):
    """Token ids with one run of tokens per image, in the order of the message parts."""

    token_ids: list[int]
    images: tuple[ImageInput, ...] = ()
    positions: Positions = ()
    is_thinking: bool = False  #: whether the prompt ends within the reasoning


NOT_SCORED = 1 << 62  #: `num_scored_tokens` where no prompt logprobs are requested
#: Number of newer requests that overtake a batch sequence before it is treated as interactive.
MAX_OVERTAKES = 32


class Sequence(Struct, eq=False):
    """Tokens of one request and how many of them are computed.

    There is no prefill flag: `num_computed_tokens` catches up with `num_tokens` after admission, a prefix hit, a
    preemption or a takeover.
    """

    request_id: str
    token_ids: list[int]  #: prompt, then output; the only token list
    num_prompt_tokens: int
    sampling: SamplingParams
    images: tuple[ImageInput, ...] = ()
    cache_salt: str = ""
    priority: Priority = Priority.INTERACTIVE
    is_streamed: bool = True
    prompt_positions: Positions = ()  #: rotary positions; empty: 0, 1, 2 ...
    adapter: Adapter | None = None
    constraint: Constraint | None = None
    max_output_tokens: int = 1
    eos_token_ids: tuple[int, ...] = ()  #: not sampled before `sampling.min_tokens`
    is_running: bool = False  #: only running sequences hold blocks
    num_computed_tokens: int = 0  #: tokens with keys and values in the cache
    num_scored_tokens: int = NOT_SCORED  #: prompt tokens whose logprobs are reported
    num_cached_tokens: int = 0  #: prompt tokens found in the prefix cache at first scheduling
    block_ids: list[int] = field(default_factory=list)  #: the block table
    block_hashes: list[bytes] = field(default_factory=list)  #: of its full blocks, computed lazily
    num_published_blocks: int = 0  #: leading blocks in the prefix cache
    num_preemptions: int = 0
    num_overtakes: int = 0  #: how often a newer request was started before it
    finish_reason: FinishReason | None = None
    history: Any = None  #: the speculator's n-gram index; None without speculation
    token_counts: Any = None  #: the sampler's counts of tokens, for penalties
    _shift: int = 0  #: rotary position minus index of output tokens

    def __post_init__(self) -> None:
        rows = self.prompt_positions
        # output tokens have the same position in all rows, after the largest of the prompt
        self._shift = max(map(max, rows)) + 1 - self.num_prompt_tokens if rows else 0

    @classmethod
    def from_request(
        cls, request: EngineRequest, max_output_tokens: int, eos_token_ids: Iterable[int] = ()
    ) -> "Sequence":
        """The sequence of a request, with the output of earlier attempts after the prompt."""
        salt, adapter, sampling = request.cache_salt, request.adapter, request.sampling
        if adapter is not None:  # keys and values depend on the adapter
            salt = f"{salt}\0{adapter.digest}"
        # an attempt that emitted a token has reported all prompt logprobs
        wants_scores = sampling.num_prompt_logprobs is not None and not request.output_token_ids
        ends = (*eos_token_ids, *sampling.stop_token_ids) if sampling.min_tokens else ()
        return cls(
            request_id=request.request_id,
            token_ids=[*request.prompt_token_ids, *request.output_token_ids],
            num_prompt_tokens=len(request.prompt_token_ids),
            sampling=sampling,
            images=request.images,
            cache_salt=salt,
            priority=request.priority,
            is_streamed=request.is_streamed,
            prompt_positions=request.positions,
            adapter=adapter,
            constraint=request.constraint and request.constraint.begin(),
            max_output_tokens=max_output_tokens,
            eos_token_ids=ends,
            num_scored_tokens=0 if wants_scores else NOT_SCORED,
        )

    def positions(self, start: int, end: int) -> list[list[int]]:
        """Rotary positions from `start` to before `end`, by row; a single row if all are equal."""
        if not self.prompt_positions:
            return [list(range(start, end))]
        split, shift = self.num_prompt_tokens, self._shift
        later = range(max(start, split) + shift, max(end, split) + shift)
        return [[*row[start:end], *later] for row in self.prompt_positions]

    @property
    def is_smooth(self) -> bool:
        """Whether prefill and image encoding in the same step are limited, so that its next token is not late."""
        return self.is_streamed and self.priority is Priority.INTERACTIVE

    @property
    def is_preemptible(self) -> bool:
        """Whether interactive sequences may preempt it: batch work that was not overtaken too often."""
        return self.priority is Priority.BATCH and self.num_overtakes < MAX_OVERTAKES

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """Number of leading tokens that may come from the prefix cache, because their logits are not needed."""
        if self.num_scored_tokens < self.num_prompt_tokens:
            return max(self.num_scored_tokens - 1, 0)
        return len(self.token_ids) - 1

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens to compute before the next token can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens


class ScheduledSequence(Struct, eq=False):
    """One sequence in a step: computes the tokens from `start` to before `end`. Immutable."""

    sequence: Sequence
    num_new_tokens: int  #: pending tokens that the step computes, and the `draft`
    #: Index of the item that samples the new token in the step in flight; None: the token is known.
    in_flight_index: int | None = None
    draft: tuple[int, ...] = ()  #: draft tokens, which follow the end of the sequence
    start: int = 0
    end: int = 0
    samples: bool = False  #: whether the sequence's end is reached, so that a token is sampled

    def __post_init__(self) -> None:
        sequence, num_tokens = self.sequence, len(self.sequence.token_ids)
        is_known = self.in_flight_index is None
        self.start = start = sequence.num_computed_tokens if is_known else num_tokens
        self.end = end = start + self.num_new_tokens
        self.samples = end >= num_tokens

    @property
    def output_position(self) -> int:
        """Number of output tokens before the sampled one."""
        return self.end - len(self.draft) - self.sequence.num_prompt_tokens

    @property
    def scored(self) -> range:
        """Prompt tokens whose logprobs the step computes, from the logits of the token before each."""
        sequence = self.sequence
        num_scored = sequence.num_scored_tokens
        if num_scored >= sequence.num_prompt_tokens or self.in_flight_index is not None:
            return range(0)
        # the first token has no logprob
        first = max(self.start + 1, num_scored) if num_scored else 0
        return range(first, min(self.end + 1, sequence.num_prompt_tokens))

    @property
    def token_ids(self) -> list[int]:
        """The tokens that the step computes, without a token that is still being sampled."""
        known = self.sequence.token_ids[self.start : self.end]
        return [*known, *self.draft] if self.draft else known

    @property
    def images(self) -> list[ImageInput]:
        start, end = self.start, self.end
        return [
            image
            for image in self.sequence.images
            if image.offset < end and image.offset + image.num_tokens > start
        ]


def shorten(
    items: Items[ScheduledSequence], num_tokens: Mapping[str, int]
) -> list[ScheduledSequence | None]:
    """The items, shortened to the `num_tokens` of their requests; None for 0 tokens."""
    return [
        item if (num := num_tokens.get(item.sequence.request_id)) is None
        else ScheduledSequence(item.sequence, num) if num else None
        for item in items
    ]  # fmt: skip


class Batch(Struct):
    """One step: any mix of prefill chunks and decode tokens."""

    items: list[ScheduledSequence] = field(default_factory=list)
    #: Time limit of image encoding while other sequences decode; None: no limit.
    max_vision_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens for item in self.items)
