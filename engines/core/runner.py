"""The seam between the scheduler and the arithmetic: protocols that the mock and torch both keep.

A backend is a `ModelRunner` (computes steps, called by the engine thread alone), and a `Processor`
(turns messages and image bytes into engine inputs; thread-safe, called from a pool).
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from msgspec import Struct, field

from engines.base import Adapter, AdapterLimits, Decode
from engines.core.constraint import ConstraintFailure
from engines.core.request import ImageInput, Positions
from engines.core.sequence import Batch, Sequence
from engines.image_decoder import decode_image
from shared.protocol import ChatMessage, Ending, ErrorCode, TemplateOption, Tools

if TYPE_CHECKING:
    from engines.text.reasoning import Reasoning
    from engines.text.tools import ToolFormat


class PixelLimits(NamedTuple):
    """Between how many pixels an image is scaled. 0: the processor's own limit."""

    least: int = 0
    most: int = 0


NO_LIMITS = PixelLimits()
NO_OPTIONS: Mapping[str, TemplateOption] = {}


class SequenceFailure(Exception):
    """A step failed because of one sequence, which alone ends; the others are computed again.

    Raised by a `ModelRunner` before it changes any state of others. The client sees the message.
    """

    def __init__(
        self, request_id: str, message: str, code: ErrorCode = ErrorCode.ENGINE_FAILURE
    ) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.code = code


class DeviceOutOfMemory(Exception):
    """A step did not fit the device's memory and computed nothing; a smaller one may."""


def token_mask(sequence: Sequence) -> bytes:
    """A bit for each token that a constrained sequence may go on with. Raises: SequenceFailure."""
    assert sequence.constraint is not None
    try:
        return sequence.constraint.mask(sequence.token_ids, sequence.num_prompt_tokens)
    except ConstraintFailure as failure:
        raise SequenceFailure(sequence.request_id, str(failure), failure.code) from None


class TokenChoice(Struct):
    """A sequence's next token; `top_logprobs` are (token id, natural logarithm), best first.

    `following` are those behind it that the step has sampled too: one for each token of a draft
    that was right.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    following: "tuple[TokenChoice, ...]" = ()


class PromptScore(Struct):
    """The logprob of a prompt's token, its rank from 1, and the best (token id, logprob) there."""

    position: int
    logprob: float = 0.0
    rank: int = 0  #: 0 for the first token, which has no logprob
    top: tuple[tuple[int, float], ...] = ()


class StepResult(Struct):
    """What a step computed: per scheduled sequence a token, or None while its prompt is unfinished.

    `vision_s` is the part of the step that went into encoding images. `deferred` are the requests
    whose share was left for a later step, because of an image of theirs; of these, `over_budget`
    are the ones whose image is not encoded yet, so that the next step beside streams leaves them
    too.
    """

    choices: list[TokenChoice | None]
    vision_s: float = 0.0
    deferred: frozenset[str] = frozenset()
    over_budget: frozenset[str] = frozenset()
    #: By request, of the tokens `ScheduledSequence.scored`.
    prompt_scores: dict[str, list[PromptScore]] = field(default_factory=dict)


class RunningStep(Protocol):
    """A step that was launched."""

    @property
    def can_be_followed(self) -> bool:
        """Whether a step may be launched behind it that decodes the tokens of this one."""
        ...

    def wait(self) -> StepResult:
        """What was computed. Raises: SequenceFailure, DeviceOutOfMemory."""
        ...


class ComputedStep(Struct):
    """A step that was computed while it was launched."""

    result: StepResult
    can_be_followed: bool = False

    def wait(self) -> StepResult:
        return self.result


class ModelRunner(Protocol):
    """Computes steps. KV slots are the scheduler's: it names blocks, the runner owns tensors."""

    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    shares_prefixes: bool  #: whether blocks hold all that is known of their tokens
    binds_prompts: bool  #: whether a prompt's tokens see all of it: one step computes them
    runs_async: bool  #: whether a device computes beside the host, which goes on meanwhile

    def launch(self, batch: Batch) -> RunningStep:
        """Begin to compute every scheduled token, and to sample the next one of caught-up sequences.

        At most one step is under way when another is launched, and whoever has a share in both
        `in_flight_index`. All that is read of the sequences is read here. Raises: SequenceFailure,
        DeviceOutOfMemory, as does waiting for the step; anything else is the end of the engine.
        """
        ...

    def run(self, batch: Batch) -> StepResult:
        """Launch a step and wait for it."""
        ...

    def load_adapter(self, directory: Path, limits: AdapterLimits) -> Adapter:
        """Make an adapter of its files, for sequences to have. Thread-safe. Raises: BadAdapter."""
        ...

    def release(self, request_id: str) -> None:
        """Drop what is kept for a request that ended (pinned encoder features, sampler state)."""
        ...

    def encoder_cache_counts(self) -> tuple[int, int, int]:
        """Images asked for, found in the cache, and bytes now held."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """Bytes by use: weights, kv_cache, encoder_cache."""
        ...

    def close(self) -> None: ...


class Tokenizer(Protocol):
    """Token ids and their bytes; what the detokenizer and the prompt builder need, no more."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    drops_leading_space: bool  #: decoding drops one space at the start of the text (sentencepiece)

    def encode(self, text: str) -> list[int]:
        """Ordinary text to ids: special tokens spelled in it stay text."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes that a token adds to the text; empty for special tokens."""
        ...

    def token_string(self, token_id: int) -> str:
        """How the vocabulary spells a token; empty for one that it does not have."""
        ...


class Prompt(Struct, frozen=True):
    """Token ids with one run of tokens per image; `images` come in the order of the parts."""

    token_ids: list[int]
    images: tuple[ImageInput, ...] = ()
    positions: Positions = ()
    is_thinking: bool = False  #: whether it ends within the thinking that comes before an answer


class Processor(Protocol):
    """Messages and images to a prompt. Thread-safe: called from a pool, off the engine thread."""

    tokenizer: Tokenizer
    max_model_len: int
    image_tokens: int  #: the most tokens that one image may come to
    #: Whether short messages are a prompt in less time than another thread would cost.
    is_quick: bool
    decodes_images: bool  #: whether it looks at pixels, not only at headers
    reasoning: "Reasoning | None"  #: how its model marks what it thinks before it answers
    tool_format: "ToolFormat"  #: how its model writes calls of functions
    shows_tools: bool  #: whether its chat template tells the model of functions
    spelled: Mapping[int, str]  #: tokens that are no text, and begin or end a call

    def process_image(
        self,
        data: bytes,
        expected_size: tuple[int, int],
        decode: Decode = decode_image,
        pixels: PixelLimits = NO_LIMITS,
    ) -> Any:
        """Decode and resize one image.

        `expected_size` is the (width, height) that was admitted; an image of another is refused
        before it is decoded. `decode` says where that is done. Raises: InvalidImage.
        """
        ...

    def build_prompt(
        self,
        messages: Items[ChatMessage],
        images: Items[tuple[str, Any]],
        options: Mapping[str, TemplateOption] = NO_OPTIONS,
        tools: Tools | None = None,
        ending: Ending = "answer",
    ) -> Prompt:
        """Apply the chat template. `images[i]` is (image hash, pixels) of the part with index i.

        `options` are further variables of the template, `tools` what the model is told of. Raises: InvalidRequest.
        """
        ...

    def encode_prompt(self, text: str, *, add_special_tokens: bool) -> Prompt:
        """A text as it stands: special tokens spelled in it are tokens."""
        ...
