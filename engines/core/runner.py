"""Interfaces of a backend (mock or torch), and the sampling of drafted tokens, which the backends share.

A `ModelRunner` computes steps on the engine thread. A `Processor` turns messages and images into prompts; it is
thread-safe.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from msgspec import Struct, field
from PIL import Image

from engines.base import Adapter, AdapterLimits, OpenAudio, OpenVideo
from engines.core.constraint import ConstraintFailure
from engines.core.sequence import NO_OPTIONS, Batch, ImageInput, Prompt, ScheduledSequence, Sequence
from engines.text.detokenizer import Tokenizer
from shared.protocol import ChatMessage, Ending, ErrorCode, TemplateOption, Tools

if TYPE_CHECKING:
    from engines.text.reasoning import Reasoning
    from engines.text.tools import ToolFormat


class PixelLimits(NamedTuple):
    """Minimum and maximum number of pixels of a scaled image. 0: the processor's own limit."""

    least: int = 0
    most: int = 0

    def scale(self, image: Image.Image) -> Image.Image:
        """The image within the limits, with the same aspect ratio."""
        area = image.width * image.height
        wanted = min(max(area, self.least), self.most or area)
        if wanted == area:
            return image
        ratio, fit = (wanted / area) ** 0.5, int if wanted < area else ceil
        size = max(1, fit(image.width * ratio)), max(1, fit(image.height * ratio))
        return image.resize(size, Image.Resampling.BICUBIC)


NO_LIMITS = PixelLimits()


class SequenceFailure(Exception):
    """A step failed because of one sequence, which ends with this message. The other sequences are computed again.

    Raised by a `ModelRunner` before it changes any state of other sequences.
    """

    def __init__(
        self, request_id: str, message: str, code: ErrorCode = ErrorCode.ENGINE_FAILURE
    ) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.code = code


class DeviceOutOfMemory(Exception):
    """A step did not fit into device memory and computed nothing; a smaller step may fit."""


def token_mask(sequence: Sequence) -> bytes:
    """Bit mask of the tokens that the sequence's grammar allows. Raises: SequenceFailure."""
    assert sequence.constraint is not None
    try:
        return sequence.constraint.mask(sequence.token_ids, sequence.num_prompt_tokens)
    except ConstraintFailure as failure:
        raise SequenceFailure(sequence.request_id, str(failure), failure.code) from None


class TokenChoice(Struct):
    """A sampled token; `top_logprobs` are (token id, natural logarithm), best first.

    `following` are the tokens after it from the same step, one per accepted draft token.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    following: "tuple[TokenChoice, ...]" = ()


class PromptScore(Struct):
    """Logprob and rank of a prompt token, and the best (token id, logprob) at its position."""

    position: int
    logprob: float = 0.0
    rank: int = 0  #: 0 for the first token, which has no logprob
    top: tuple[tuple[int, float], ...] = ()


#: Called with indices of items, and the number of tokens that were added to their sequences; returns their next tokens.
Sample = Callable[[list[int], int], list[TokenChoice]]


def sample_drafts(
    items: Items[ScheduledSequence], choices: list[TokenChoice | None], sample: Sample
) -> None:
    """Sample the tokens after accepted draft tokens, and append them to `following` of the choices.

    During calls of `sample` the sequences contain the tokens sampled so far.
    """
    first = {p: each for p, each in enumerate(choices) if items[p].draft and each is not None}
    ends = {place: len(items[place].sequence.token_ids) for place in first}
    last, num_more = first, 0
    try:
        while accepted := [
            place
            for place, choice in last.items()
            if items[place].draft[num_more : num_more + 1] == (choice.token_id,)
        ]:
            for place in accepted:
                items[place].sequence.token_ids.append(last[place].token_id)
            num_more += 1
            last = dict(zip(accepted, sample(accepted, num_more), strict=True))
            for place, choice in last.items():
                first[place].following += (choice,)
    finally:
        for place, end in ends.items():
            del items[place].sequence.token_ids[end:]


class StepResult(Struct):
    """The result of a step: one token per item, or None if the item's prompt is unfinished.

    `vision_s` is the time of image encoding. `over_budget` are requests whose image is not fully encoded yet. While
    other requests decode, the next step can encode the image further, but computes no tokens of these requests.
    """

    choices: list[TokenChoice | None]
    vision_s: float = 0.0
    #: For requests whose scheduled tokens reach an unencoded image: number of computed tokens before it, or 0.
    num_computed: dict[str, int] = field(default_factory=dict)
    over_budget: frozenset[str] = frozenset()
    #: Scores by request, for the tokens of `ScheduledSequence.scored`.
    prompt_scores: dict[str, list[PromptScore]] = field(default_factory=dict)


class RunningStep(Protocol):
    @property
    def can_be_followed(self) -> bool:
        """Whether the next decode step may be launched before this one is done."""
        ...

    def wait(self) -> StepResult:
        """The result. Raises: SequenceFailure, DeviceOutOfMemory."""
        ...


class ComputedStep(Struct):
    """A step that was computed synchronously."""

    result: StepResult
    can_be_followed: bool = False

    def wait(self) -> StepResult:
        return self.result


class ModelRunner(Protocol):
    """Computes steps. The scheduler allocates KV blocks by number; the runner owns the tensors."""

    block_size: int
    num_blocks: int
    max_model_len: int
    vocab_size: int
    shares_prefixes: bool  #: whether KV blocks are the only state, so that prefixes can be shared
    #: Whether attention in prompts is bidirectional, so that one step computes a whole prompt.
    binds_prompts: bool
    runs_async: bool  #: whether `launch` returns before the device has computed the step

    def launch(self, batch: Batch) -> RunningStep:
        """Start computing the scheduled tokens and sampling.

        At most one other step is in flight; items whose sequence is in that step too have an `in_flight_index`. `wait`
        does not read sequences. Raises: SequenceFailure, DeviceOutOfMemory; any other error is fatal to the engine.
        """
        ...

    def split(self, image: ImageInput) -> Items[ImageInput]:
        """Chunks of an image, video or audio that are encoded independently, in order."""
        ...

    def load_adapter(self, directory: Path, limits: AdapterLimits) -> Adapter:
        """Load an adapter. Thread-safe. Raises: BadAdapter."""
        ...

    def release(self, request_id: str) -> None:
        """Free the state of a request that ended (encoder features, sampler state)."""
        ...

    def encoder_cache_counts(self) -> tuple[int, int, int]: ...

    def memory_bytes(self) -> dict[str, int]:
        """Bytes by use: weights, kv_cache, encoder_cache."""
        ...

    def close(self) -> None: ...


class Processor(Protocol):
    """Builds prompts from messages and images. Thread-safe."""

    tokenizer: Tokenizer
    image_tokens: int  #: maximum tokens of one image
    #: Whether building a short prompt is cheaper than a switch to another thread.
    is_quick: bool
    decodes_images: bool  #: whether `process_image` reads pixels, not only headers
    takes_video: bool
    max_audio_s: float  #: as in `Capabilities`
    reasoning: "Reasoning | None"  #: the reasoning markers of the model
    tool_format: "ToolFormat"  #: the function call format of the model
    shows_tools: bool  #: whether the chat template lists functions
    spelled: Mapping[int, str]  #: texts of special tokens that begin or end a call
    template_options: frozenset[str]  #: variables of the chat template that requests may set

    def process_image(self, image: Image.Image, pixels: PixelLimits = NO_LIMITS) -> Any:
        """Resize one image. Raises: InvalidImage."""
        ...

    def process_video(self, video: OpenVideo) -> Any:
        """Sample, decode and resize a video. Raises: InvalidImage."""
        ...

    def process_audio(self, audio: OpenAudio) -> Any:
        """Decode and process audio. Raises: InvalidImage."""
        ...

    def build_prompt(
        self,
        messages: Items[ChatMessage],
        images: Items[tuple[str, Any]],
        options: Mapping[str, TemplateOption] = NO_OPTIONS,
        tools: Tools | None = None,
        ending: Ending = "answer",
    ) -> Prompt:
        """Apply the chat template. `images[i]` is (image hash, pixels) of the image with index i.

        `options` are template variables, `tools` the functions that the template lists. Raises: InvalidRequest.
        """
        ...

    def encode_prompt(self, text: str, *, add_special_tokens: bool) -> Prompt:
        """Tokenize a text without a template. Special tokens spelled in the text become special tokens."""
        ...
