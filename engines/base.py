"""The seam between a worker and an engine: one model on one device, driven step by step.

Called by the worker's engine thread. It must not know Redis, HTTP, settings or metrics: what it has to tell
is in `EngineOutput` and `EngineStats`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shared.protocol import (
    FinishReason,
    OutputLogprob,
    Priority,
    SamplingParams,
    StageTimings,
    Usage,
)


class EngineError(Exception):
    """Base of all that `Engine.add` may raise; the message is fit for the client's eyes."""


class PromptTooLong(EngineError):
    """Prompt and requested output do not fit the model's context or the KV cache."""


class InvalidImage(EngineError):
    """A image's bytes cannot be decoded or are of no use to the model."""


class InvalidRequest(EngineError):
    """A parameter that this model cannot honour, such as a biased token outside its vocabulary."""


class EngineStartError(Exception):
    """Base of what making an engine raises where the operator is to mend it; the message says how."""


class UnsupportedCheckpoint(EngineStartError):
    """The checkpoint is not one that the engine can run; the message says why and what would do."""


class SequenceFailure(Exception):
    """A step failed because of one sequence, which alone ends; the others are computed again.

    Raised by a `ModelRunner` before it changes any state of others. The client sees the message.
    """

    def __init__(self, request_id: str, message: str) -> None:
        super().__init__(message)
        self.request_id = request_id


class DeviceOutOfMemory(Exception):
    """A step did not fit the device's memory and computed nothing; a smaller one may."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of one engine. Units: tokens, sequences, bytes."""

    max_num_seqs: int = 32  #: sequences that share a step
    max_num_batched_tokens: int = 1024  #: new tokens that one step computes at most
    max_mixed_prefill_tokens: int | None = None
    """Prompt tokens of a step in which others draw tokens; None: measured at the start (mock: no limit)."""
    block_size: int = 16  #: tokens in a KV block
    num_kv_blocks: int | None = None  #: None: from `kv_cache_bytes`
    kv_cache_bytes: int | None = None  #: None: a share of free memory
    kv_dtype: Literal["auto", "int8"] = "auto"  #: auto: the engine's own precision
    disabled_gpu_kernels: tuple[str, ...] = ()  #: names of what a GPU is not to use
    max_model_len: int | None = None  #: None: the checkpoint's own
    enable_prefix_cache: bool = True
    encoder_cache_bytes: int = 256 * 1024 * 1024
    max_images_per_step: int = 8  #: images that one step encodes at most
    overlap_steps: bool | None = None
    """Launch a step before the tokens of the one before it are known; None: where a device computes beside the host."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image in a prompt: a run of `num_tokens` tokens from `offset`, some of which are slots.

    `image_hash` identifies it in every cache, together with how it was processed; `pixels` is whatever the runner's
    own image processor made. Tokens of the run that are no slots, such as line breaks, are embedded as text.
    """

    offset: int
    num_tokens: int
    image_hash: str
    pixels: Any
    slots: tuple[tuple[int, int], ...] = ()
    """Runs of slots as (start, stop) within the image, which its features fill in order. Empty: all of it."""
    grid: tuple[
        int, ...
    ] = ()  #: rows and columns of slots and the like, where positions depend on them

    @property
    def slot_runs(self) -> tuple[tuple[int, int], ...]:
        """Where features go, as (start, stop) within the image."""
        return self.slots or ((0, self.num_tokens),)

    @property
    def num_slots(self) -> int:
        """Rows of features that the image has."""
        return sum(stop - start for start, stop in self.slot_runs)


#: Rotary positions of a prompt: R rows of one number a token. Empty: 0, 1, 2 ... in every row.
Positions = tuple[Sequence[int], ...]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt ready for the engine. Output tokens of an earlier attempt come along and are continued."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    images: tuple[ImageInput, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    priority: Priority = Priority.INTERACTIVE
    positions: Positions = ()  #: of the prompt; output tokens go on behind the largest


@dataclass(slots=True)
class EngineOutput:
    """What one step made for one request. The first output of a request may have no token yet.

    `index` is the number of output tokens before `token_ids`. `finish_reason` or `error` make it terminal;
    `usage` is complete then, and `timings` hold the engine's own stages (queue, vision, prefill, decode).
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[OutputLogprob, ...] = ()
    usage: Usage | None = None  #: set on the first output of a request and on the last
    finish_reason: FinishReason | None = None
    error: str | None = None
    timings: StageTimings | None = None


@dataclass(slots=True)
class EngineStats:
    """A image of the engine now, and counts since its start."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_batch: int = 0  #: of these, the ones that let others pass
    num_steps: int = 0  #: advances with every step: the worker's heartbeat follows it
    kv_usage_ratio: float = 0.0
    num_free_blocks: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_encoder_queries: int = 0
    num_encoder_hits: int = 0
    encoder_cache_bytes: int = 0
    num_preemptions: int = 0
    memory_bytes: dict[str, int] = field(default_factory=dict)  #: by use: weights, kv_cache, ...
    startup_s: dict[str, float] = field(default_factory=dict)  #: by phase: load, quantize, warmup


class Engine(ABC):
    """One model on one device. Not thread-safe: a single thread makes every call."""

    @abstractmethod
    def add(self, request: EngineRequest) -> None:
        """Accept a request. Raises: EngineError, and then nothing is queued."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Forget a request and free what it holds. Idempotent; unknown ids are ignored; no output follows."""

    @abstractmethod
    def step(self) -> list[EngineOutput]:
        """One forward pass of the batch. Returns what each of its requests has to say."""

    @abstractmethod
    def has_work(self) -> bool:
        """Whether `step` has anything to compute."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """The engine's present state; cheap."""

    @abstractmethod
    def close(self) -> None:
        """Free the device. Idempotent."""
