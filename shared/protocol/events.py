"""The events of a call, as workers publish them.

Invariants, for each call:

1. The events are `Started? (Tokens* | Vectors | Scores | Tokenized) (Finished | Failed)`. Exactly one terminal event
   reaches the client; vectors, scores and tokenizations arrive together with it.
2. `Tokens.index` counts output tokens from 0 without a gap. The concatenated `Tokens.text` is the answer, and
   `Tokens.calls` are its function calls: the name of each comes first, and the next call ends it.
3. All events of an attempt carry its number; a higher attempt supersedes a lower one.
"""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from shared.protocol.tasks import Report


class FinishReason(StrEnum):
    """Why an answer ended: OpenAI's reasons, and `abort` for a client that disconnected."""

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
    #: Every worker that ran it was lost, while running other requests too.
    TOO_MANY_ATTEMPTS = "too_many_attempts"
    #: Its worker was lost each time that it ran alone.
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
    """Token counts of a request. Prompt tokens include image tokens and cached tokens."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_image_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0  #: output tokens before the first of the answer


class StageTimings(Report, frozen=True, omit_defaults=True):
    """Seconds in each stage, by the worker's monotonic clock; the time in the queue also by Redis's clock."""

    queue_s: float = 0.0  #: in Redis until claimed, and in the engine until first scheduled
    preprocess_s: float = 0.0  #: fetch, decode, resize, template, tokenize, add to the engine
    vision_s: float = 0.0  #: vision tower and projector
    prefill_s: float = 0.0  #: first scheduled until first token, without vision
    decode_s: float = 0.0  #: first token until last
    media_decode_s: float = (
        0.0  #: before `preprocess_s`, with a video: fetch, decode and resize all media
    )


#: Prefix of a spelled token that is not UTF-8; its bytes in hexadecimal follow.
_RAW = "\N{REPLACEMENT CHARACTER}"
#: Minus infinity, as OpenAI writes it: JSON has no infinity.
_LOWEST_LOGPROB = -9999.0


class TokenLogprob(Report, frozen=True, array_like=True):
    """The natural log probability of a token; an array on the wire, since an answer may have 21 for each token.

    `spelled`: the token's text, or its bytes in hexadecimal if they are not complete UTF-8.
    """

    spelled: str
    logprob: float

    @classmethod
    def of(cls, token_bytes: bytes, logprob: float) -> "TokenLogprob":
        """Create it from a token's bytes; the logprob has the seven digits of float32."""
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
    """A token of the prompt and the most probable ones at its position."""

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
    prompt_token_ids: tuple[int, ...] = ()  #: if the task asks for them


class CallPiece(Report, frozen=True, array_like=True):
    """A piece of a function call. The first piece has the name, later ones the arguments."""

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

    index: int  #: output tokens before these
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[OutputLogprob, ...] = msgspec.field(default=(), name="lp")
    #: Tokens without an id, of engines behind an API. Another worker cannot continue the answer.
    num_without_id: int = 0
    reasoning: str = ""  #: reasoning before the answer; precedes `text`
    calls: tuple[CallPiece, ...] = ()  #: follow `text`
    #: Of a range of the prompt, before the first output token; a later attempt may repeat some.
    prompt_logprobs: tuple[PromptLogprob, ...] = msgspec.field(default=(), name="plp")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_without_id


class Vectors(Event, frozen=True):
    """A vector for each input of the call. Shapes: (inputs, dimensions) little-endian float32, row by row."""

    dimensions: int
    data: bytes = b""
    is_stored: bool = False  #: the data is the stored result of this attempt


class Scores(Event, frozen=True):
    """A score for each document of the call. Shapes: (documents) little-endian float32."""

    data: bytes = b""
    is_stored: bool = False  #: as in `Vectors`


class Tokenized(Event, frozen=True):
    """The tokenization of a request."""

    num_tokens: int = 0
    num_image_tokens: int = 0  #: included in `num_tokens`
    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()  #: each token as the vocabulary spells it
    text: str = ""  #: of the token ids


class Finished(Event, frozen=True):
    """The answer is complete. Terminal."""

    finish_reason: FinishReason
    usage: Usage
    timings: StageTimings = StageTimings()
    stopped_by: str = ""  #: the stop string that ended it


class Failed(Event, frozen=True):
    """The request failed. Terminal. `message` is shown to the client."""

    code: ErrorCode
    message: str
    param: str | None = None


CallEvent = Started | Tokens | Vectors | Scores | Tokenized | Finished | Failed
