"""The wire between gateway and worker: requests out, events back.

Called by both ends; it must not know HTTP, Redis or any model. JSON by msgspec, versioned, readable in
redis-cli. Requests are read strictly, because what a client asks for must not be overlooked; in what workers
send unknown fields are ignored, so that workers and gateways may be updated one after another. Laws that every producer keeps and every consumer may rely on, per request:

1. events are `Started? Delta* (Finished | Failed)`; exactly one terminal event reaches the client;
2. `Delta.index` counts output tokens from 0 without gap; concatenated `Delta.text` is the answer;
3. all events of one attempt carry its number; a higher attempt supersedes a lower one.
"""

from enum import StrEnum
from typing import Literal

import msgspec

PROTOCOL_VERSION = 1


class FinishReason(StrEnum):
    """Why an answer ended, in OpenAI's words, and `abort` for a client that left."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Priority(StrEnum):
    """Who is waited for. Batch work takes what interactive work leaves, and gives it back."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class ErrorCode(StrEnum):
    """Every reason for which a request may fail after it was accepted."""

    INVALID_IMAGE = "invalid_image"
    IMAGE_UNAVAILABLE = "image_unavailable"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_REQUEST = "invalid_request"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    #: Every worker that tried it was lost while it ran other requests too: perhaps not its fault.
    TOO_MANY_ATTEMPTS = "too_many_attempts"
    #: It ran alone each time that its worker was lost.
    REQUEST_KILLS_WORKERS = "request_kills_workers"
    ENGINE_FAILURE = "engine_failure"
    WORKER_LOST = "worker_lost"


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of nothing but a shared configuration: frozen, strict."""


class Report(msgspec.Struct, frozen=True):
    """Base of what workers send: frozen, and fields that newer workers add are ignored."""


class SamplingParams(Message, frozen=True, omit_defaults=True):
    """How to draw tokens. Neutral values are the defaults, so that greedy text needs only `temperature=0`.

    Units: probabilities and temperatures are pure numbers, `max_tokens` counts output tokens.
    """

    max_tokens: int | None = None  #: None: as many as the context holds
    temperature: float = 1.0  #: 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  #: 0: all
    min_p: float = 0.0
    seed: int = (
        0  #: always set by the gateway; the noise is a pure function of (seed, output position)
    )
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    num_logprobs: int | None = None  #: None: none; k: the chosen token's and the k best
    ignore_eos: bool = False


class TextPart(Message, frozen=True, tag_field="type", tag="text"):
    """Ordinary text; special tokens spelled inside it stay text."""

    text: str


class ImagePart(Message, frozen=True, tag_field="type", tag="image"):
    """One image: an index into `GenerateRequest.images`."""

    image: int


class ChatMessage(Message, frozen=True):
    """One turn of the conversation; roles are `system`, `user` and `assistant`."""

    role: Literal["system", "user", "assistant"]
    parts: tuple[TextPart | ImagePart, ...]


class ImageRef(Message, frozen=True):
    """A image by the SHA-256 (hex) of its encoded bytes, which lie in the image store."""

    sha256: str
    media_type: str
    width: int
    height: int
    num_bytes: int


class GenerateRequest(Message, frozen=True, omit_defaults=True):
    """One answer to make. `n` choices are `n` requests that share their images."""

    request_id: str
    reply_to: str  #: the gateway's id, which names its mailbox
    model: str
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    images: tuple[ImageRef, ...] = ()
    cache_salt: str = ""  #: separates the caches of tenants
    priority: Priority = Priority.INTERACTIVE
    trace_parent: str | None = None
    stream: bool = (
        True  #: whether tokens are wanted as they come; else they may wait for one another
    )
    is_detached: bool = (
        False  #: it goes on without its gateway: its answer may be asked for elsewhere
    )
    version: int = PROTOCOL_VERSION


class Usage(Report, frozen=True, omit_defaults=True):
    """Token counts of one request; the prompt's include its image and cached tokens."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_image_tokens: int = 0
    num_cached_tokens: int = 0


class StageTimings(Report, frozen=True, omit_defaults=True):
    """Seconds spent in each stage, by the worker's monotonic clock (queue: plus Redis's own clock)."""

    queue_s: float = 0.0  #: in Redis until claimed, and in the engine until first scheduled
    preprocess_s: float = 0.0  #: fetch, decode, resize, template, tokenize, hand over
    vision_s: float = 0.0  #: vision tower and projector
    prefill_s: float = 0.0  #: first scheduled until first token, without vision
    decode_s: float = 0.0  #: first token until last


#: Begins how a token is spelled whose bytes are no text; their hexadecimal digits follow.
_RAW = "\N{REPLACEMENT CHARACTER}"
#: The logarithm of no probability at all, as OpenAI writes it: JSON has no infinity.
_LOWEST_LOGPROB = -9999.0


class TokenLogprob(Report, frozen=True, array_like=True):
    """One token's natural-log probability. There may be 21 for each token of an answer: on the wire it is an array.

    `spelled` is the token's text, or says its bytes where they are not whole UTF-8.
    """

    spelled: str
    logprob: float

    @classmethod
    def of(cls, token_bytes: bytes, logprob: float) -> "TokenLogprob":
        """Of a token's raw bytes; the probability with the seven digits that float32 has."""
        try:
            spelled = token_bytes.decode()
        except UnicodeDecodeError:
            spelled = _RAW
        if spelled.startswith(_RAW):
            spelled = _RAW + token_bytes.hex()
        return cls(spelled, float(f"{max(logprob, _LOWEST_LOGPROB):.7g}"))

    @property
    def token_bytes(self) -> bytes:
        """Its raw bytes."""
        if self.spelled.startswith(_RAW):
            return bytes.fromhex(self.spelled[1:])
        return self.spelled.encode()

    @property
    def token(self) -> str:
        """Its text, with replacements for what is none."""
        return self.token_bytes.decode("utf-8", "replace")


class OutputLogprob(Report, frozen=True, array_like=True):
    """The chosen token and its best rivals, most probable first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


class Started(Report, frozen=True, tag_field="type", tag="started", omit_defaults=True):
    """The engine accepted the prompt, so that the status line may be sent."""

    request_id: str
    attempt: int
    usage: Usage


class Delta(Report, frozen=True, tag_field="type", tag="delta", omit_defaults=True):
    """The next output tokens and the text that they complete (perhaps none yet)."""

    request_id: str
    attempt: int
    index: int  #: how many output tokens came before these
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[OutputLogprob, ...] = msgspec.field(default=(), name="lp")


class Finished(Report, frozen=True, tag_field="type", tag="finished", omit_defaults=True):
    """The answer is complete. Terminal."""

    request_id: str
    attempt: int
    finish_reason: FinishReason
    usage: Usage
    timings: StageTimings = StageTimings()


class Failed(Report, frozen=True, tag_field="type", tag="failed", omit_defaults=True):
    """The request ends without a complete answer. Terminal. `message` is fit for the client's eyes."""

    request_id: str
    attempt: int
    code: ErrorCode
    message: str
    param: str | None = None


GenerateEvent = Started | Delta | Finished | Failed


class ModelCard(Report, frozen=True, omit_defaults=True):
    """What a worker says of the model that it serves; the gateway's `/v1/models` is made of these."""

    name: str
    created_at: int  #: epoch seconds at which the worker loaded it, for the wire's `created`
    max_model_len: int
    vocab_size: int
    supports_images: bool = True
    tokens_per_image: int = 0


class _AnyEvent(Report, frozen=True):
    """What events of every version have: enough to know whether a request has ended."""

    type: str
    request_id: str
    attempt: int


_request_decoder = msgspec.json.Decoder(GenerateRequest)
_events_decoder = msgspec.json.Decoder(tuple[GenerateEvent, ...])
_event_decoder = msgspec.json.Decoder(GenerateEvent)
_any_events_decoder = msgspec.json.Decoder(tuple[msgspec.Raw, ...])
_any_event_decoder = msgspec.json.Decoder(_AnyEvent)
_card_decoder = msgspec.json.Decoder(ModelCard)
_encoder = msgspec.json.Encoder()

encode = _encoder.encode


def decode_request(data: bytes) -> GenerateRequest:
    """Read a request. Raises: msgspec.ValidationError on any departure from the schema."""
    return _request_decoder.decode(data)


def decode_events(data: bytes) -> tuple[GenerateEvent, ...]:
    """Read one mailbox entry; what newer workers add is ignored. Raises: msgspec.MsgspecError."""
    try:
        return _events_decoder.decode(data)
    except msgspec.ValidationError:
        events = [_decode_newer(raw) for raw in _any_events_decoder.decode(data)]
        return tuple(event for event in events if event is not None)


def _decode_newer(raw: msgspec.Raw) -> GenerateEvent | None:
    """An event in today's words: None for a kind that did not exist, a plain end for an unknown reason."""
    try:
        return _event_decoder.decode(raw)
    except msgspec.ValidationError:
        event = _any_event_decoder.decode(raw)
        fields = msgspec.json.decode(raw)
        if event.type == "failed" and _is_news(fields.get("code"), ErrorCode):
            return msgspec.convert({**fields, "code": ErrorCode.ENGINE_FAILURE}, Failed)
        if event.type == "finished" and _is_news(fields.get("finish_reason"), FinishReason):
            return msgspec.convert({**fields, "finish_reason": FinishReason.STOP}, Finished)
        if event.type in ("started", "delta", "failed", "finished"):
            raise
        return None


def _is_news(word: object, known: type[StrEnum]) -> bool:
    return isinstance(word, str) and word not in set(known)


def decode_card(data: bytes) -> ModelCard:
    """Read a model card; unknown fields are ignored. Raises: msgspec.MsgspecError."""
    return _card_decoder.decode(data)
