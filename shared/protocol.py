"""The wire protocol between gateways and workers: tasks, calls, their events and model cards, as JSON.

The queue does not decode tasks. Invariants of the events that workers publish, for each call:

1. The events are `Started? (Tokens* | Vectors | Scores | Tokenized) (Finished | Failed)`. Exactly one terminal event
   reaches the client; vectors, scores and tokenizations arrive together with it.
2. `Tokens.index` counts output tokens from 0 without a gap. The concatenated `Tokens.text` is the answer, and
   `Tokens.calls` are its function calls, one after another: each begins with the piece that has its name.
3. All events of an attempt carry its number; a higher attempt supersedes a lower one.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Self, get_args

import msgspec
from msgspec.structs import astuple, replace


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the structs that gateways send. Unknown fields are an error, so that workers ignore no field."""


class Report(msgspec.Struct, frozen=True):
    """Base of the structs that workers send. Fields that newer workers add are ignored."""


class TextPart(Message, frozen=True, tag_field="type", tag="text"):
    """Plain text. Special tokens in it are tokenized as ordinary text."""

    text: str


class ImagePart(Message, frozen=True, tag_field="type", tag="image"):
    """An image, video or audio file, by its index in the task's `images`."""

    image: int


class TokensPart(Message, frozen=True, tag_field="type", tag="tokens"):
    """Token ids of the model's vocabulary, special tokens included."""

    token_ids: tuple[int, ...]


class ToolCall(Message, frozen=True):
    """A function call of the assistant. `arguments` is JSON, unless the model generated invalid JSON."""

    id: str
    name: str
    arguments: str


class ChatMessage(Message, frozen=True, omit_defaults=True):
    """A message of a conversation. A message of role `tool` is the result of a call."""

    role: Literal["system", "user", "assistant", "tool"]
    parts: tuple[TextPart | ImagePart, ...]
    reasoning: str = ""  #: the assistant's reasoning before `parts`
    tool_calls: tuple[ToolCall, ...] = ()  #: the assistant's calls after `parts`
    tool_call_id: str = ""  #: for role `tool`: id of the call


class Function(Message, frozen=True, omit_defaults=True):
    name: str
    parameters: str  #: a JSON schema
    description: str = ""
    is_strict: bool = False  #: unsupported schema keywords are an error


class Tools(Message, frozen=True, omit_defaults=True):
    functions: tuple[Function, ...]
    is_required: bool = False  #: the answer must be a call
    is_parallel: bool = True  #: the answer may be several calls


class _Located(Message, frozen=True, kw_only=True, omit_defaults=True):
    url: str = ""  #: signed URL from which a worker reads the blob; empty: read it from Redis


class BlobRef(_Located, frozen=True, omit_defaults=True):
    """A blob in the blob store, by its SHA-256 (hexadecimal)."""

    sha256: str
    num_bytes: int


#: Media type of a video that is sent as JPEG frames; its blob is a MessagePack list of the frames.
FRAMES_TYPE = "video/jpeg"


class VideoOptions(Message, frozen=True, omit_defaults=True):
    """How frames of a video are sampled. Units: seconds."""

    fps: float | None = None  #: sampled frames per second; for a list of frames: their rate
    num_frames: int | None = None
    start_s: float = 0.0
    end_s: float = 0.0  #: 0: the end of the video


#: Kinds of media parts of a message.
MediaKind = Literal["image", "video", "audio"]


class ImageRef(BlobRef, frozen=True, omit_defaults=True):
    """An encoded image, video or audio in the blob store. Units: pixels, 0 for a video or audio."""

    media_type: str
    width: int
    height: int
    min_pixels: int = 0  #: smaller images are scaled up to this; 0: the model's minimum
    max_pixels: int = 0  #: larger images are scaled down to this; 0: the model's maximum
    video: VideoOptions | None = None  #: only for videos
    param: str = ""  #: path of the field in the client's request
    start_s: float = 0.0  #: start of the part of an audio file to use
    end_s: float = 0.0  #: end of that part; 0: the end of the file

    @property
    def kind(self) -> MediaKind:
        if self.media_type.startswith("audio/"):
            return "audio"
        return "image" if self.video is None else "video"


class SamplingParams(Message, frozen=True, omit_defaults=True):
    """Sampling parameters. The defaults are no-op values: greedy text needs only `temperature=0`."""

    #: None: up to the context length. 0: compute only the prompt, such as for its logprobs.
    max_tokens: int | None = None
    temperature: float = 1.0  #: 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  #: 0: all
    min_p: float = 0.0
    #: Set by the gateway. Random numbers depend only on the seed and the output position.
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  #: end the answer, even with `ignore_eos`
    keeps_stop: bool = False  #: include the stop string in the text
    allowed_token_ids: tuple[int, ...] = ()  #: empty: all
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    num_logprobs: int | None = None  #: k: the sampled token and the k most probable; None: none
    num_prompt_logprobs: int | None = None  #: the same for each prompt token
    ignore_eos: bool = False
    min_tokens: int = 0  #: no end of sequence before this many tokens
    skip_special_tokens: bool = True  #: False: special tokens are part of the text
    returns_prompt_ids: bool = False  #: `Started` has the token ids of the prompt


#: json: a JSON object, or the schema in `source`; choice: one string of the JSON array in `source`.
GrammarKind = Literal["json", "regex", "choice", "lark"]


#: JSON schema keywords that grammars cannot enforce.
UNSUPPORTED_KEYWORDS = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "propertyNames",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "unevaluatedProperties",
        "unevaluatedItems",
        "$dynamicAnchor",
        "$dynamicRef",
        "$recursiveRef",
        "contentSchema",
    ]
)


class Grammar(Message, frozen=True, omit_defaults=True):
    """A grammar that the answer must match. Engines that do not support grammars refuse the call."""

    kind: GrammarKind
    source: str
    param: str  #: path of the field in the client's request
    is_lenient: bool = False  #: ignore unsupported schema keywords


#: The value of a chat template variable that a client sets.
TemplateOption = bool | int | float | str | None


#: End of the rendered conversation. answer: generation prompt; message: last message, to be continued; none: closed.
Ending = Literal["answer", "message", "none"]


class _Task(Message, frozen=True, tag_field="task", tag=str.lower, omit_defaults=True):
    """Base of the tasks. Tasks with images override `with_images`. A task's `texts` yields all of its text."""

    def with_images(self, images: Sequence[ImageRef]) -> Self:
        """The same task with the images of its request."""
        return self


class Generate(_Task, frozen=True):
    """Generate one answer to a conversation or a prompt. `n` choices are `n` calls with the same images."""

    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    images: tuple[ImageRef, ...] = ()
    #: Chat template variables by name.
    template_options: dict[str, TemplateOption] = msgspec.field(default_factory=dict)
    grammar: Grammar | None = None
    tools: Tools | None = None
    ending: Ending = "answer"
    #: Replaces the messages and the chat template. Special tokens in its text are tokenized as such.
    prompt: TextPart | TokensPart | None = None
    #: True: the tokenizer adds special tokens, such as BOS, to a text prompt.
    add_special_tokens: bool = True

    @property
    def param(self) -> str:
        """The field of the client's request that holds the input."""
        return "messages" if self.prompt is None else "prompt"

    def texts(self) -> Iterator[str]:
        if isinstance(self.prompt, TextPart):
            yield self.prompt.text
        yield from (value for value in self.template_options.values() if isinstance(value, str))
        for function in self.tools.functions if self.tools is not None else ():
            yield from (function.description, function.parameters)
        for message in self.messages:
            if message.reasoning:
                yield message.reasoning
            yield from (call.arguments for call in message.tool_calls)
            yield from (part.text for part in message.parts if isinstance(part, TextPart))

    def with_images(self, images: Sequence[ImageRef]) -> Self:
        return replace(self, images=tuple(images))


#: The end at which an input that is too long is truncated; none: refuse the input.
Truncate = Literal["none", "start", "end"]


class Embed(_Task, frozen=True):
    """Compute a vector for each input. A request may be split into several calls."""

    inputs: tuple[TextPart | ImagePart | TokensPart, ...]
    images: tuple[ImageRef, ...] = ()
    #: Name of the model's prompt to prepend to each text; empty: the default prompt; None: no prompt.
    prompt_name: str | None = ""
    dimensions: int | None = None  #: truncate the vectors to this many; None: all
    is_normalized: bool = True  #: scale vectors to length 1
    truncate: Truncate = "none"
    #: Index of the first input in the request's list; None: the request has a single input.
    first: int | None = 0
    max_tokens: int | None = None  #: per input, special tokens included; None: the model's limit

    def texts(self) -> Iterator[str]:
        return (part.text for part in self.inputs if isinstance(part, TextPart))

    def with_images(self, images: Sequence[ImageRef]) -> Self:
        """The same task with the images that its inputs use, renumbered."""
        used: dict[int, int] = {}
        inputs = tuple(
            ImagePart(used.setdefault(part.image, len(used)))
            if isinstance(part, ImagePart)
            else part
            for part in self.inputs
        )
        return replace(self, inputs=inputs, images=tuple(images[index] for index in used))

    def param(self, index: int) -> str:
        """The path of an input in the client's request."""
        return "input" if self.first is None else f"input.[{self.first + index}]"


class Rerank(_Task, frozen=True):
    """Score documents by their relevance to the query. A request may be split into several calls."""

    queries: tuple[str, ...]  #: one query for all documents, or one query per document
    documents: tuple[str, ...]
    max_document_tokens: int | None = None  #: longer documents are truncated
    truncate: Truncate = "none"  #: of a query and a document, only the document is truncated
    is_raw: bool = False  #: raw logits without activation
    name: str = "documents"  #: field of the request that holds the documents
    #: Index of the first document in the request's list; None: the request has a single document.
    first: int | None = 0
    images: tuple[ImageRef, ...] = ()

    def texts(self) -> Iterator[str]:
        yield from self.queries
        yield from self.documents

    def param(self, index: int) -> str:
        """The path of a document in the client's request."""
        return self.name if self.first is None else f"{self.name}.[{self.first + index}]"


class Tokenize(_Task, frozen=True):
    """Tokenize a request, or detokenize ids, without running the model."""

    of: Generate | None = None  #: None: detokenize `token_ids`
    token_ids: tuple[int, ...] = ()
    with_ids: bool = True  #: False: return only the count
    with_strings: bool = False  #: also return each token as the vocabulary spells it
    finds_segments: bool = False  #: return only the segments of the audio file, without tokens

    @property
    def images(self) -> tuple[ImageRef, ...]:
        return () if self.of is None else self.of.images

    def texts(self) -> Iterator[str]:
        return iter(()) if self.of is None else self.of.texts()

    def with_images(self, images: Sequence[ImageRef]) -> Self:
        return self if self.of is None else replace(self, of=self.of.with_images(images))


class Run(_Task, frozen=True):
    """A task of an application; the input is opaque."""

    input: msgspec.Raw  #: one line of JSON
    session: str = ""  #: empty: without a session
    common: BlobRef | None = None  #: the session's common data: one line of JSON
    is_streamed: bool = False  #: stream the output
    keep_s: float = 0.0  #: minimum time to keep the result
    id: str = ""  #: id of the task in its session

    @property
    def images(self) -> tuple[ImageRef, ...]:
        return ()

    def texts(self) -> Iterator[str]:
        yield bytes(self.input).decode()


class RunOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a task's output: a streamed item, or the final output."""

    item: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    output: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


Task = Generate | Embed | Rerank | Tokenize | Run


class FinishReason(StrEnum):
    """The reason why an answer ended: a reason of OpenAI's API, or `abort` for a client that disconnected."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


class ErrorCode(StrEnum):
    """Errors of requests that were accepted."""

    INVALID_IMAGE = "invalid_image"
    IMAGE_UNAVAILABLE = "image_unavailable"
    #: The adapter was unloaded or replaced after the request was accepted.
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_REQUEST = "invalid_request"
    #: Gateway and worker speak different versions of the protocol.
    UNSUPPORTED_VERSION = "unsupported_version"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    #: Every worker that ran the request was lost, but also ran other requests at the time.
    TOO_MANY_ATTEMPTS = "too_many_attempts"
    #: The worker was lost each time the request ran alone on it.
    REQUEST_KILLS_WORKERS = "request_kills_workers"
    #: A schema or grammar that cannot be compiled.
    INVALID_GRAMMAR = "invalid_grammar"
    #: A grammar beyond the time or memory limit.
    GRAMMAR_TOO_COMPLEX = "grammar_too_complex"
    #: The application failed the task.
    TASK_FAILED = "task_failed"
    ENGINE_FAILURE = "engine_failure"
    WORKER_LOST = "worker_lost"


class Usage(Report, frozen=True, omit_defaults=True):
    """Token counts of a request. Prompt tokens include media tokens and cached tokens."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_image_tokens: int = 0  #: of images and videos
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0  #: output tokens of the reasoning, before the answer
    num_audio_tokens: int = 0

    @property
    def num_text_tokens(self) -> int:
        return self.num_prompt_tokens - self.num_image_tokens - self.num_audio_tokens

    def __add__(self, other: "Usage") -> "Usage":
        mine, theirs = astuple(self), astuple(other)
        return Usage(*map(sum, zip(mine, theirs, strict=True)))


class StageTimings(Report, frozen=True, omit_defaults=True):
    """Seconds in each stage, by the worker's monotonic clock. The wait in Redis is measured by Redis's clock."""

    queue_s: float = 0.0  #: in Redis until claimed, and in the engine until first scheduled
    preprocess_s: float = 0.0  #: fetch, decode, resize, template, tokenize, add to the engine
    vision_s: float = 0.0  #: vision tower and projector
    prefill_s: float = 0.0  #: first scheduled until first token, without vision
    decode_s: float = 0.0  #: first token until last
    #: Requests with a video: fetch, decode and resize all media, before `preprocess_s`.
    media_decode_s: float = 0.0

    @property
    def total_s(self) -> float:
        return sum(astuple(self))


#: Prefix of a spelled token that is not UTF-8; its bytes in hexadecimal follow.
_RAW = "\N{REPLACEMENT CHARACTER}"
#: Minus infinity, as OpenAI writes it: JSON has no infinity.
_LOWEST_LOGPROB = -9999.0


class TokenLogprob(Report, frozen=True, array_like=True):
    """The natural log probability of a token. Encoded as an array, because an answer may have 21 per output token."""

    spelled: str  #: the token's text, or its bytes in hexadecimal if they are not valid UTF-8
    logprob: float

    @classmethod
    def of(cls, token_bytes: bytes, logprob: float) -> "TokenLogprob":
        """Create a `TokenLogprob` from a token's bytes. The logprob is rounded to the seven digits of float32."""
        try:
            spelled = token_bytes.decode()
        except UnicodeDecodeError:
            spelled = _RAW
        if spelled.startswith(_RAW):
            spelled = _RAW + token_bytes.hex()
        return cls(spelled, float(f"{max(logprob, _LOWEST_LOGPROB):.7g}"))

    @property
    def token_bytes(self) -> bytes:
        if self.spelled.startswith(_RAW):
            return bytes.fromhex(self.spelled[1:])
        return self.spelled.encode()

    @property
    def token(self) -> str:
        """The text, with replacement characters for invalid UTF-8."""
        return self.token_bytes.decode("utf-8", "replace")


class OutputLogprob(Report, frozen=True, array_like=True):
    """The sampled token and the most probable alternatives, the best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class PromptLogprob(Report, frozen=True, array_like=True):
    """A token of the prompt and the most probable tokens at its position."""

    position: int
    token_id: int
    chosen: TokenLogprob
    rank: int = 0  #: 1: the most probable token; 0: the first token, which has no logprob
    top: tuple[tuple[int, TokenLogprob], ...] = ()  #: with token ids, most probable first


class Event(Report, frozen=True, tag_field="type", tag=str.lower, omit_defaults=True):
    """Base of the events of a call: the id of its request, and the attempt that emitted it."""

    request_id: str
    attempt: int


class Started(Event, frozen=True):
    """The engine accepted the prompt; the HTTP status can be sent."""

    usage: Usage
    prompt_token_ids: tuple[int, ...] = ()  #: empty unless the task requests them


class CallPiece(Report, frozen=True, array_like=True):
    """A piece of a function call. The first piece has the name, later pieces have the arguments."""

    index: int  #: of the call in the answer
    name: str = ""
    arguments: str = ""  #: a piece of JSON


def join_calls(pieces: Iterable[CallPiece]) -> tuple[CallPiece, ...]:
    """Merge adjacent pieces of a call's arguments."""
    joined: list[CallPiece] = []
    for piece in pieces:
        if joined and not piece.name and piece.index == joined[-1].index:
            last = joined[-1]
            joined[-1] = CallPiece(last.index, last.name, last.arguments + piece.arguments)
        else:
            joined.append(piece)
    return tuple(joined)


class Tokens(Event, frozen=True):
    """The next output tokens, and the text that they complete, if any."""

    index: int  #: number of output tokens before this event
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[OutputLogprob, ...] = msgspec.field(default=(), name="lp")
    #: Number of tokens without a known id, from engines behind an API. Another worker cannot continue such an answer.
    num_without_id: int = 0
    reasoning: str = ""  #: reasoning before the answer; precedes `text`
    calls: tuple[CallPiece, ...] = ()  #: function calls after `text`
    #: Logprobs of a range of the prompt, sent before the first output token. A later attempt may send them again.
    prompt_logprobs: tuple[PromptLogprob, ...] = msgspec.field(default=(), name="plp")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_without_id


def join_tokens(request_id: str, attempt: int, pieces: Sequence[Any]) -> Tokens:
    """Merge consecutive `Tokens` events, or consecutive outputs of an engine, into one event."""
    first = pieces[0]
    if len(pieces) == 1 and not first.calls:
        return Tokens(
            request_id,
            attempt,
            first.index,
            first.token_ids,
            first.text,
            first.logprobs,
            first.num_without_id,
            first.reasoning,
            (),
            first.prompt_logprobs,
        )
    token_ids, logprobs, calls = [*first.token_ids], [*first.logprobs], [*first.calls]
    prompt_logprobs = first.prompt_logprobs
    texts, thoughts, num_without_id = [first.text], [first.reasoning], first.num_without_id
    for piece in pieces[1:]:  # most have few tokens and a short text
        token_ids += piece.token_ids
        texts.append(piece.text)
        if piece.logprobs:
            logprobs += piece.logprobs
        if piece.calls:
            calls += piece.calls
        if piece.reasoning:
            thoughts.append(piece.reasoning)
        if piece.prompt_logprobs:
            prompt_logprobs += piece.prompt_logprobs
        if piece.num_without_id:
            num_without_id += piece.num_without_id
    return Tokens(
        request_id,
        attempt,
        first.index,
        tuple(token_ids),
        "".join(texts),
        tuple(logprobs),
        num_without_id,
        "".join(thoughts),
        join_calls(calls) if calls else (),
        prompt_logprobs,
    )


class Vectors(Event, frozen=True):
    """A vector for each input of the call. Shapes: (inputs, dimensions) little-endian float32, row by row."""

    dimensions: int
    data: bytes = b""
    is_stored: bool = False  #: the data is stored as the result of this attempt


class Scores(Event, frozen=True):
    """A score for each document of the call. Shapes: (documents) little-endian float32."""

    data: bytes = b""
    is_stored: bool = False  #: as in `Vectors`


class Tokenized(Event, frozen=True):
    num_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()  #: each token as the vocabulary spells it
    text: str = ""  #: the detokenized text
    #: Ends of the segments into which the audio is split for the model. Units: seconds.
    segment_ends: tuple[float, ...] = ()
    #: For each video: the number of sampled frames, and of all its frames.
    frames: tuple[tuple[int, int], ...] = ()


class Finished(Event, frozen=True):
    """The answer is complete. Terminal."""

    finish_reason: FinishReason
    usage: Usage
    timings: StageTimings = StageTimings()
    stopped_by: str = ""  #: the stop string that ended the answer


class Failed(Event, frozen=True):
    """The request failed. Terminal. `message` is shown to the client."""

    code: ErrorCode
    message: str
    param: str | None = None


CallEvent = Started | Tokens | Vectors | Scores | Tokenized | Finished | Failed


PROTOCOL_VERSION = 2


class UnsupportedVersion(Exception):
    """Gateway and worker have different protocol versions."""


def explain_versions(gateway: int, worker: int) -> str:
    older = "gateway" if gateway < worker else "worker"
    return f"the gateway speaks protocol {gateway}, the worker {worker}: update the {older}"


class Priority(StrEnum):
    """The priority of a call. Batch calls run when no interactive calls wait."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class Call(Message, frozen=True, tag_field="version", tag=PROTOCOL_VERSION, omit_defaults=True):
    """One task for one model. The version is the first encoded field, and is checked before the rest is decoded."""

    id: str
    reply_to: str  #: id of the gateway, whose mailbox receives the events
    model: str
    task: Task
    tenant: str = ""  #: the tenant whose limits apply and whose cache entries may be used
    priority: Priority = Priority.INTERACTIVE
    trace_parent: str | None = None
    #: False: the worker may delay and combine events.
    wants_stream: bool = True
    #: The call continues if its gateway is lost, and another gateway may return the answer.
    is_resumable: bool = False
    adapter: str = ""  #: digest of the LoRA adapter


class Envelope(NamedTuple):
    """A call for the queue, which does not decode `payload`."""

    id: str
    model: str
    reply_to: str
    tenant: str
    priority: Priority
    payload: bytes


#: Chat template variables that turn reasoning on and off.
THINKING_SWITCHES = frozenset({"enable_thinking", "thinking"})


class SamplingDefaults(Report, frozen=True, omit_defaults=True):
    """Sampling defaults of the checkpoint; None: unspecified. Fields of a request override them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None


class AdapterCard(Report, frozen=True, omit_defaults=True):
    """A LoRA adapter of a worker. `error`: the reason why it is not loaded."""

    name: str
    digest: str = ""  #: of its files; empty: not loaded
    created_at: int = 0  #: epoch seconds at which the worker loaded it
    revision: str = ""  #: revision of an adapter that was loaded at run time; empty: loaded by the worker's settings
    error: str = ""


class ModelCard(Report, frozen=True):
    """A model and its capabilities, as in `/v1/models`.

    A card of another protocol version has only `name` and `version`.
    """

    name: str
    created_at: int  #: epoch seconds at which the worker loaded it
    max_model_len: int
    vocab_size: int
    supports_images: bool = True
    supports_video: bool = False
    supports_audio: bool = False
    transcription_prompt: str = ""  #: prompt it was trained with; empty: any prompt
    image_tokens: int = 0  #: maximum per image, for quotas; 0: unknown
    max_image_pixels: int = 0  #: larger images are scaled down; 0: the processor decides
    tasks: tuple[str, ...] = ("generate",)  #: tags of the supported tasks
    dimensions: int = 0  #: dimensions of its embeddings; 0: the model computes none
    shorter_dimensions: tuple[int, ...] = ()  #: supported truncated sizes
    prompts: tuple[str, ...] = ()  #: names of the prompts that can precede a text
    sampling: SamplingDefaults = SamplingDefaults()
    dtype: str = ""  #: empty: unknown
    quantization: str = ""  #: empty: none, or unknown
    format: str = ""  #: of its weights, such as `safetensors`
    reasoning: str = ""  #: format of its reasoning; empty: no reasoning, or unknown
    always_thinks: bool = False  #: reasoning cannot be turned off
    template_options: tuple[str, ...] = ()  #: chat template variables that a request may set
    supports_grammars: bool = False  #: structured outputs
    adapters: tuple[AdapterCard, ...] = ()  #: each served as `name:adapter`
    parent: str = ""  #: base model of an adapter; they share a queue
    adapter: str = ""  #: digest of an adapter
    digest: str = ""  #: of the files that determine its vectors; empty: unknown
    package: str = ""  #: of a deployment: `name@digest`; empty: none
    version: int = PROTOCOL_VERSION  #: protocol version of its workers

    @property
    def queue(self) -> str:
        """The model whose queue receives the calls; for an adapter, its base model."""
        return self.parent or self.name


class _Versioned(msgspec.Struct):
    """The common field of calls and cards of every version; version 1 omitted it."""

    version: int = 1


class _AnyCard(_Versioned, kw_only=True):
    name: str


class _AnyEvent(Report, frozen=True):
    """The common fields of events of every version."""

    type: str
    request_id: str
    attempt: int


_call_decoder = msgspec.json.Decoder(Call)
_events_decoder = msgspec.json.Decoder(tuple[CallEvent, ...])
_any_card_decoder = msgspec.json.Decoder(_AnyCard)
_card_decoder = msgspec.json.Decoder(ModelCard)
_encoder = msgspec.json.Encoder()
_EVENT_TYPES = {kind.__struct_config__.tag for kind in get_args(CallEvent)}
#: First bytes of every call of this version. A call without `version` is of version 1, even if it could be decoded.
_CALL_HEAD = b'{"version":%d,' % PROTOCOL_VERSION

encode = _encoder.encode


def seal(call: Call) -> Envelope:
    return Envelope(call.id, call.model, call.reply_to, call.tenant, call.priority, encode(call))


def decode_call(data: bytes) -> Call:
    """Raises: UnsupportedVersion, msgspec.MsgspecError."""
    if not data.startswith(_CALL_HEAD):
        version = msgspec.json.decode(data, type=_Versioned).version
        if version != PROTOCOL_VERSION:
            raise UnsupportedVersion(explain_versions(version, PROTOCOL_VERSION))
    return _call_decoder.decode(data)


def encode_events(events: Iterable[CallEvent]) -> bytes:
    """Encode events as comma-separated JSON objects, an item of a log."""
    return b",".join([_encoder.encode(event) for event in events])


def decode_log(log: Sequence[bytes]) -> tuple[CallEvent, ...]:
    """Decode the items of a log. Raises: msgspec.MsgspecError."""
    return decode_events(b"[" + b",".join(log) + b"]") if log else ()


def decode_events(data: bytes) -> tuple[CallEvent, ...]:
    """Decode a mailbox entry; additions of newer workers are ignored. Raises: msgspec.MsgspecError."""
    try:
        return _events_decoder.decode(data)
    except msgspec.ValidationError:
        raws = msgspec.json.decode(data, type=tuple[msgspec.Raw, ...])
        events = [_decode_newer(raw) for raw in raws]
        return tuple(event for event in events if event is not None)


def _decode_newer(raw: msgspec.Raw) -> CallEvent | None:
    """Decode an event of a newer worker. Unknown events are None; unknown reasons and error codes are replaced."""
    try:
        return msgspec.json.decode(raw, type=CallEvent)
    except msgspec.ValidationError:
        event = msgspec.json.decode(raw, type=_AnyEvent)
        fields = msgspec.json.decode(raw)
        if event.type == "failed" and _is_unknown(fields.get("code"), ErrorCode):
            return msgspec.convert({**fields, "code": ErrorCode.ENGINE_FAILURE}, Failed)
        if event.type == "finished" and _is_unknown(fields.get("finish_reason"), FinishReason):
            return msgspec.convert({**fields, "finish_reason": FinishReason.STOP}, Finished)
        if event.type in _EVENT_TYPES:
            raise
        return None


def _is_unknown(word: object, known: type[StrEnum]) -> bool:
    return isinstance(word, str) and word not in set(known)


def decode_card(data: bytes) -> ModelCard:
    card = _any_card_decoder.decode(data)
    if card.version != PROTOCOL_VERSION:
        return ModelCard(card.name, 0, 0, 0, version=card.version)
    return _card_decoder.decode(data)


_TO_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_RUNS = re.compile(rb"\[+|\]+")
_SHALLOW = 3
_FEW_BYTES = 4096  #: maximum size for `count`


def _has_more(data: bytes, max_brackets: int) -> bool:
    """True if there are more opening brackets. Long data is mostly base64, where `find` is faster than `count`."""
    if len(data) <= _FEW_BYTES:
        return data.count(b"[") + data.count(b"{") > max_brackets
    num_left = max_brackets
    for bracket in (b"[", b"{"):
        at = data.find(bracket)
        while at >= 0:
            if num_left == 0:
                return True
            num_left -= 1
            at = data.find(bracket, at + 1)
    return False


def is_deeper(data: bytes, max_levels: int) -> bool:
    """True if valid JSON nests arrays and objects deeper than `max_levels`."""
    if not _has_more(data, max_levels):
        return False
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    outline = b"".join(data.split(b'"')[::2]).translate(_TO_BRACKETS, _NO_BRACKETS)
    for _ in range(_SHALLOW):  # removes most brackets of a value that is wide but not deep
        outline = outline.replace(b"[]", b"")
    depth = _SHALLOW
    for run in _RUNS.finditer(outline):
        num = run.end() - run.start()
        depth += num if run[0].startswith(b"[") else -num
        if depth > max_levels:
            return True
    return False
