"""The interface between a worker and an engine: one model on one device, driven step by step.

A worker asks what the engine can do (`capabilities`), prepares calls in its threads
(`prepare_image`, `prepare`), and hands what came of them to one thread that drives the engine
(`add`, `step`, `abort`). What the engine has to tell is in `EngineOutput` and `EngineStats`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
)


class RequestError(Exception):
    """One call that cannot be served; the message is fit for the client's eyes.

    `param` names what is to blame in the request, in the words of the wire.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """Prompt and requested output do not fit the model's context or the KV cache."""


class InvalidImage(RequestError):
    """An image's bytes cannot be decoded or are of no use to the model."""


class InvalidRequest(RequestError):
    """A parameter that this model cannot honour, such as a biased token outside its vocabulary."""


class BadGrammar(RequestError):
    """A schema or grammar that no answer can be held to; the message says why."""


class GrammarTooComplex(RequestError):
    """A schema or grammar that takes more time or memory than a request may."""


class BadAdapter(RequestError):
    """An adapter that cannot be loaded; the message says why and what would do."""


class AdapterUnavailable(RequestError):
    """The request's adapter is not loaded here, or not any more."""


class EngineStartError(Exception):
    """An engine that cannot be made until the operator mends what the message names."""


class EngineLoadFailed(Exception):
    """An engine that could not be made this time; another try may succeed."""


class UnsupportedCheckpoint(EngineStartError):
    """The checkpoint is not one that the engine can run; the message says why and what would do."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a worker has to know of an engine before it gives it work."""

    max_num_seqs: int  #: calls that it works on at a time
    tasks: tuple[str, ...] = ("generate",)  #: tags of the tasks that it takes
    #: Whether `prepare_image` decodes images of strangers: it is given a decoder in processes
    #: without rights.
    decodes_images: bool = False
    #: Whether a short call is prepared in less time than another thread would cost.
    prepares_quickly: bool = False
    #: Whether it holds an answer to a grammar.
    takes_grammars: bool = False


class EngineCall(msgspec.Struct, frozen=True):
    """One attempt at a call, as `prepare` gets it."""

    request_id: str  #: of this attempt; the engine's outputs carry it
    task: Task
    tenant: str = ""  #: tenants share no cache
    priority: Priority = Priority.INTERACTIVE
    output_token_ids: tuple[int, ...] = ()  #: told by earlier attempts, to be continued
    adapter: str = ""  #: digest of a loaded one; empty: the model itself
    common_data: bytes = b""  #: of a task's session: JSON


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What an adapter may be."""

    max_rank: int
    max_bytes: int  #: of its files


class Adapter(Protocol):
    """Changes to a model's weights that an engine holds beside them, for the requests that ask."""

    @property
    def digest(self) -> str:
        """Of its files: the same content has the same name everywhere."""
        ...

    @property
    def rank(self) -> int:
        """The largest of its changes."""
        ...

    @property
    def num_bytes(self) -> int: ...


class PreparedImage(msgspec.Struct, frozen=True):
    """What `prepare_image` made. The hash names it in every cache and is the tenant's own."""

    image_hash: str
    content: Any


#: Bytes and the (width, height) that was admitted, to an RGB image. Raises: InvalidImage.
Decode = Callable[[bytes, tuple[int, int] | None], Image.Image]


@dataclass(frozen=True, slots=True)
class Tokenization:
    """What `Engine.tokenize` made: ids and how each is spelled, or a text."""

    token_ids: Sequence[int] = ()
    num_image_tokens: int = 0  #: of these
    strings: Sequence[str] = ()
    text: str = ""


class EngineInput(Protocol):
    """A call ready for `Engine.add`. The rest of it is the engine's own."""

    @property
    def request_id(self) -> str: ...

    @property
    def priority(self) -> Priority: ...


class EngineOutput(msgspec.Struct):
    """What one step made for one request. The first output of a request may have no token yet.

    `index` is the number of output tokens before these. An engine that has no token ids sets
    `num_without_id`: usage, rates and the order of events count tokens, not texts. `finish_reason`
    or `error` make it terminal; `usage` is complete then, and `timings` hold the engine's own
    stages (queue, vision, prefill, decode).
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[OutputLogprob, ...] = ()
    usage: Usage | None = None  #: set on the first output of a request and on the last
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: ErrorCode = ErrorCode.ENGINE_FAILURE
    timings: StageTimings | None = None
    num_without_id: int = 0  #: further tokens, whose ids the engine does not know
    stopped_by: str = ""  #: which stop string ended it
    reasoning: str = ""  #: what the model thinks before its answer; it stands before `text`
    calls: tuple[CallPiece, ...] = ()  #: of functions; behind `text`
    prompt_token_ids: tuple[int, ...] = ()  #: with the first usage, where the request asks for them
    prompt_logprobs: tuple[PromptLogprob, ...] = ()  #: a range of the prompt; before any token
    #: Little-endian float32 of a call that asks for numbers, with its last output: its vectors, one after another,
    #: or its scores.
    values: bytes = b""
    dimensions: int = 0  #: of a vector; 0: the values are scores


class EngineStats(msgspec.Struct):
    """An image of the engine now, and counts since its start."""

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
    num_result_queries: int = 0  #: inputs looked up among the results of earlier ones
    num_result_hits: int = 0  #: of these, those that needed no computing of their own
    result_cache_bytes: int = 0
    num_preemptions: int = 0
    num_guessed_tokens: int = 0  #: computed ahead, in answers held to a grammar
    num_accepted_tokens: int = 0  #: of these, those that came
    num_adapters: int = 0
    memory_bytes: dict[str, int] = msgspec.field(
        default_factory=dict
    )  #: by use: weights, kv_cache, ...
    startup_s: dict[str, float] = msgspec.field(
        default_factory=dict
    )  #: by phase: load, quantize, warmup


Input = TypeVar("Input", bound=EngineInput)


class Engine(ABC, Generic[Input]):
    """One model on one device. One thread drives it; any thread may prepare calls."""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What it can do; always the same."""

    def can_continue(self, task: Task) -> bool:
        """Whether `prepare` accepts output tokens of an earlier attempt at this task. Thread-safe."""
        return False

    def prepare_image(self, data: bytes, image: ImageRef, decode: Decode) -> Any:
        """An image as `prepare` wants it: the encoded bytes, unless an engine decodes them.

        The worker keeps it for other calls, at the cost of its `nbytes` or length. Thread-safe.
        Raises: InvalidImage.
        """
        return data

    @abstractmethod
    def prepare(self, call: EngineCall, images: Sequence[PreparedImage]) -> Input:
        """What `add` takes; `images[i]` is the task's i-th. Thread-safe. Raises: RequestError."""

    def tokenize(self, task: Tokenize, images: Sequence[PreparedImage]) -> Tokenization:
        """What the task asks for, of an engine that offers it; it is answered by that alone.

        Thread-safe. Raises: RequestError.
        """
        raise InvalidRequest("the model's engine has no tokenizer", "model")

    def load_adapter(self, directory: Path, limits: AdapterLimits) -> Adapter:
        """Hold an adapter, by its digest, from now on. Thread-safe. Raises: BadAdapter."""
        raise BadAdapter("the model's engine takes no adapters")

    def unload_adapter(self, digest: str) -> None:
        """Give an adapter to no further request; those that have it keep it. Thread-safe."""

    @abstractmethod
    def add(self, request: Input) -> None:
        """Accept a prepared call. Raises: RequestError, and then nothing is queued."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Forget a request and free what it holds; no output follows. Unknown ids are ignored."""

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


#: Called with a phase (`download`, `compile`, `load`, `quantize`, `warmup`) and its share done,
#: 0..1.
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is ready, and what the world may know of its model."""

    engine: Engine[Any]
    card: ModelCard
