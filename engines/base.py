"""The interface between a worker and an engine: one model on one device.

A worker prepares calls in its threads (`prepare_image`, `prepare`). One thread drives the engine (`add`, `step`,
`abort`). Results are `EngineOutput`s and `EngineStats`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from PIL import Image

from shared.protocol import (
    CallPiece,
    ErrorCode,
    FinishReason,
    ImageRef,
    ModelCard,
    OutputLogprob,
    Priority,
    PromptLogprob,
    StageTimings,
    Task,
    Tokenize,
    Usage,
    VideoOptions,
)


class RequestError(Exception):
    """A call that cannot be served; the client sees the message. `param` names the field of the request."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """Prompt and requested output do not fit the model's context or the KV cache."""


class InvalidImage(RequestError):
    """An image cannot be decoded or used."""


class InvalidRequest(RequestError):
    """A parameter that this model does not support, such as a token id outside its vocabulary."""


class BadGrammar(RequestError):
    """A schema or grammar that cannot be enforced."""


class GrammarTooComplex(RequestError):
    """A schema or grammar that exceeds the limits of time or memory."""


class BadAdapter(RequestError):
    """An adapter that cannot be loaded."""


class AdapterUnavailable(RequestError):
    """The request's adapter is not loaded."""


class EngineStartError(Exception):
    """The engine cannot start until the operator fixes the problem in the message."""


class EngineLoadFailed(Exception):
    """The engine failed to start; a retry may succeed."""


class UnsupportedCheckpoint(EngineStartError):
    """The engine cannot run the checkpoint."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    max_num_seqs: int  #: concurrent calls
    tasks: tuple[str, ...] = ("generate",)  #: tags of supported tasks
    #: Whether `prepare_image` decodes images. They are untrusted, so the worker passes a sandboxed decoder.
    decodes_images: bool = False
    #: Whether preparing a short call is cheaper than a switch to another thread.
    prepares_quickly: bool = False
    takes_grammars: bool = False
    takes_video: bool = False
    max_audio_s: float = 0.0  #: longest audio file; 0: audio is not supported


class EngineCall(msgspec.Struct, frozen=True):
    """One attempt at a call, the input of `prepare`."""

    request_id: str  #: id of this claim, `ID@ATTEMPT.NUMBER`; copied to its outputs
    task: Task
    tenant: str = ""  #: tenants do not share cache entries
    priority: Priority = Priority.INTERACTIVE
    is_streamed: bool = True  #: whether the client waits for each token
    output_token_ids: tuple[int, ...] = ()  #: output of earlier attempts, to be continued
    adapter: str = ""  #: digest of a loaded adapter; empty: no adapter
    common_data: bytes = b""  #: JSON data shared by all tasks of the session


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    max_rank: int
    max_bytes: int  #: limit of the total size of the adapter's files


@dataclass(frozen=True)
class Adapter:
    digest: str  #: digest of the adapter's files
    rank: int = 1  #: largest rank among its layers
    num_bytes: int = 0


class PreparedImage(msgspec.Struct, frozen=True):
    """The result of `prepare_image`. The hash is the cache key; it is salted by tenant."""

    image_hash: str
    content: Any
    frames: tuple[int, int] | None = None  #: numbers of sampled and all frames of a video


#: Decodes an image file to RGB. Raises: InvalidImage, also if its (width, height) are not the given ones (None: any).
Decode = Callable[[bytes, tuple[int, int] | None], Image.Image]

#: Number of sampled frames if neither the request nor the checkpoint sets one.
DEFAULT_NUM_FRAMES = 32


class VideoInfo(msgspec.Struct, frozen=True):
    """A video or its requested part, after rotation. Values are measured, not read from headers. Units: pixels, s."""

    width: int
    height: int
    num_frames: int
    length_s: float
    is_sampled: bool = False  #: the client chose the frames, so all of them are used

    @property
    def fps(self) -> float:
        return self.num_frames / self.length_s


class FrameLimits(msgspec.Struct, frozen=True):
    max_pixels: int  #: limit of a coded frame; larger frames are refused
    max_sum_pixels: int  #: limit of all chosen frames together; frames are scaled down to meet it
    scale_min: int = 0  #: smaller frames are scaled up to this number of pixels
    scale_max: int = 0  #: larger frames are scaled down to this number of pixels; 0: no limit

    def check(self, width: int, height: int) -> None:
        """Raises: InvalidImage."""
        if not 0 < width * height <= self.max_pixels:
            raise InvalidImage(
                f"Frames of {width} x {height} are too large: send at most {self.max_pixels} pixels."
            )

    def scale(self, width: int, height: int, num_frames: int) -> tuple[int, int]:
        """Width and height of each of the chosen frames."""
        area = max(width * height, self.scale_min)
        area = min(area, self.scale_max or area, self.max_sum_pixels // max(1, num_frames))
        if area == width * height:
            return width, height
        ratio = (area / (width * height)) ** 0.5
        return max(1, int(width * ratio)), max(1, int(height * ratio))


class OpenVideo(Protocol):
    info: VideoInfo
    options: VideoOptions  #: how the request wants frames to be sampled
    max_frames: int  #: limit of sampled frames

    def frames(self, indices: Sequence[int]) -> list[Image.Image]:
        """Decode frames; can be called once. Frame i is the frame shown at i / fps seconds. Raises: InvalidImage."""
        ...


class AudioInfo(msgspec.Struct, frozen=True):
    """An audio file. Values are measured, not read from headers. Units: seconds."""

    length_s: float
    #: Ends of the segments of a transcription; empty unless requested.
    segment_ends: tuple[float, ...] = ()


class OpenAudio(Protocol):
    """An audio file in a sandboxed decoder."""

    info: AudioInfo

    def samples(self, rate: int) -> bytes:
        """Decode one channel as float32, at `rate` samples per second; can be called once. Raises: InvalidImage."""
        ...


def sample_evenly(video: OpenVideo, default: int = DEFAULT_NUM_FRAMES) -> list[int]:
    """Indices of evenly spaced frames. `default`: their number if the request sets none. Raises: InvalidImage."""
    info, options = video.info, video.options
    if info.is_sampled:
        return list(range(info.num_frames))
    count = options.num_frames or default
    if options.fps is not None:
        count = round(info.length_s * options.fps)
    count = max(1, min(count, info.num_frames))
    check_num_frames(count, video)
    return [round(i * (info.num_frames - 1) / max(1, count - 1)) for i in range(count)]


def check_num_frames(count: int, video: OpenVideo) -> None:
    """Raises: InvalidImage if a request asks for more frames than the limit."""
    if count > video.max_frames:
        raise InvalidImage(
            f"{count} frames would be sampled from the video, but the limit is {video.max_frames}: "
            "send a lower fps or num_frames, or a shorter video.",
            "num_frames" if video.options.fps is None else "fps",
        )


def can_decode_video() -> bool:
    """Whether PyAV is installed."""
    return find_spec("av") is not None


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises: InvalidRequest for an id outside the model's vocabulary. The tokenizer's vocabulary can be larger."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(each for each in token_ids if not 0 <= each < vocab_size)
        raise InvalidRequest(
            f"Token id {wrong} of {param} is outside the vocabulary: send ids from 0 to {vocab_size - 1}.",
            param,
        )


class Tokenization(msgspec.Struct, frozen=True):
    """The result of `Engine.tokenize`: token ids with their strings, a text, or the segments of an audio file."""

    token_ids: Sequence[int] = ()
    strings: Sequence[str] = ()
    text: str = ""
    segment_ends: tuple[float, ...] = ()  #: result of `Tokenize.finds_segments`, in seconds
    frames: tuple[tuple[int, int], ...] = ()  #: frames of each video, as in `PreparedImage`


class EngineInput(Protocol):
    """A prepared call. Other fields are private to the engine."""

    @property
    def request_id(self) -> str: ...

    @property
    def priority(self) -> Priority: ...


class EngineOutput(msgspec.Struct):
    """The output of one step for one request. It may have no tokens.

    `index` is the number of the request's output tokens before this output. An engine without token ids sets
    `num_without_id`. An output with `finish_reason` or `error` is terminal: `usage` is complete, and `timings` has the
    engine's stages (queue, vision, prefill, decode).
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[OutputLogprob, ...] = ()
    usage: Usage | None = None  #: set on the first and the last output of a request
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: ErrorCode = ErrorCode.ENGINE_FAILURE
    timings: StageTimings | None = None
    num_without_id: int = 0  #: number of further tokens, whose ids are unknown
    stopped_by: str = ""  #: the stop string that ended the output
    reasoning: str = ""  #: reasoning that precedes `text`
    calls: tuple[CallPiece, ...] = ()  #: function calls that follow `text`
    prompt_token_ids: tuple[int, ...] = ()  #: sent with the first usage, if requested
    prompt_logprobs: tuple[PromptLogprob, ...] = ()  #: sent before any token, if requested
    #: On the last output of a pooling task: its concatenated vectors or its scores, as little-endian float32.
    values: bytes = b""
    dimensions: int = 0  #: dimensions of each vector; 0 for scores


class EngineStats(msgspec.Struct):
    """The present state of an engine, and counts since its start."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_batch: int = 0  #: waiting requests that are batch work
    num_steps: int = 0  #: calls of `step`
    kv_usage_ratio: float = 0.0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_encoder_queries: int = 0
    num_encoder_hits: int = 0
    encoder_cache_bytes: int = 0
    num_result_queries: int = 0  #: lookups in the result cache
    num_result_hits: int = 0  #: hits of the result cache
    result_cache_bytes: int = 0
    num_preemptions: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_adapters: int = 0
    memory_bytes: dict[str, int] = {}  #: by use: weights, kv_cache, ...
    startup_s: dict[str, float] = {}  #: by phase: load, quantize, warmup


Input = TypeVar("Input", bound=EngineInput)


class Engine(ABC, Generic[Input]):
    """One model on one device. One thread drives it; any thread may prepare calls."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Constant properties."""

    def can_continue(self, task: Task) -> bool:
        """Whether `prepare` accepts output tokens of an earlier attempt at this task. Thread-safe."""
        return False

    def prepare_image(self, data: bytes, image: ImageRef, decode: Decode) -> Any:
        """Process an image for `prepare`. The default returns the encoded bytes.

        The worker's cache counts the result by its `nbytes` or length. Thread-safe. Raises: InvalidImage.
        """
        return data

    def prepare_video(self, video: OpenVideo) -> Any:
        """Sample and process a video for `prepare`; cached like images. Thread-safe. Raises: InvalidImage."""
        raise InvalidImage("The model does not support videos.")

    def prepare_audio(self, audio: OpenAudio) -> Any:
        """Decode and process audio for `prepare`; cached like images. Thread-safe. Raises: InvalidImage."""
        raise InvalidImage("The model does not support audio.")

    @abstractmethod
    def prepare(self, call: EngineCall, images: Sequence[PreparedImage]) -> Input:
        """Build the input of `add`; `images[i]` is the task's i-th image. Thread-safe. Raises: RequestError."""

    def tokenize(self, task: Tokenize, images: Sequence[PreparedImage]) -> Tokenization:
        """Run a tokenize task, which is not added to the engine. Thread-safe. Raises: RequestError."""
        raise InvalidRequest("the model's engine has no tokenizer", "model")

    def load_adapter(self, directory: Path, limits: AdapterLimits) -> Adapter:
        """Load an adapter. Thread-safe. Raises: BadAdapter."""
        raise BadAdapter("the model's engine does not support adapters")

    def unload_adapter(self, digest: str) -> None:
        """Unload an adapter; running requests keep it. Thread-safe."""

    @abstractmethod
    def add(self, request: Input) -> None:
        """Queue a prepared call. Raises: RequestError, and nothing is queued."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Drop a request; no output follows. Unknown ids are ignored."""

    @abstractmethod
    def step(self) -> list[EngineOutput]:
        """One forward pass of the batch. Returns the outputs of its requests."""

    def wake(self) -> None:
        """Interrupt a `step` that is waiting for another process. Thread-safe."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether a call of `step` would compute anything."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """The engine's current statistics; cheap to call."""

    @abstractmethod
    def close(self) -> None:
        """Free the device. Idempotent."""

    def card(self, name: str, **fields: Any) -> ModelCard:
        """The model's card: this engine's capabilities, and further `fields`."""
        has = self.capabilities()
        return ModelCard(
            name=name,
            created_at=int(time.time()),  # noqa: TID251
            tasks=has.tasks,
            supports_video=has.takes_video,
            supports_audio=has.max_audio_s > 0,
            supports_grammars=has.takes_grammars,
            **fields,
        )


#: Called with a phase (`download`, `compile`, `load`, `quantize`, `warmup`) and its progress, 0..1.
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    engine: Engine[Any]
    card: ModelCard
