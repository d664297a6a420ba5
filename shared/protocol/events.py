"""What workers report of a call.

Laws that every producer keeps and every consumer may rely on, per call:

1. events are `Started? (Tokens* | Vectors | Scores | Tokenized) (Finished | Failed)`; exactly one terminal event
   reaches the client; vectors, scores and what was tokenized come together with the end;
2. `Tokens.index` counts output tokens from 0 without gap; concatenated `Tokens.text` is the answer, and
   `Tokens.calls` are the functions that it calls: each has its name first, and ends where the next one begins;
3. all events of one attempt carry its number; a higher attempt supersedes a lower one.
"""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from shared.protocol.content import Report


class FinishReason(StrEnum):
    """Why an answer ended, in OpenAI's words, and `abort` for a client that left."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    ABORT = "abort"


class ErrorCode(StrEnum):
    """Every reason for which a request may fail after it was accepted."""

    INVALID_IMAGE = "invalid_image"
    IMAGE_UNAVAILABLE = "image_unavailable"
    #: It was unloaded or replaced after the request came.
    ADAPTER_UNAVAILABLE = "adapter_unavailable"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_REQUEST = "invalid_request"
    #: Gateway and worker speak different versions of the protocol.
    UNSUPPORTED_VERSION = "unsupported_version"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    #: Every worker that tried it was lost while it ran other requests too: perhaps not its fault.
    TOO_MANY_ATTEMPTS = "too_many_attempts"
    #: It ran alone each time that its worker was lost.
    REQUEST_KILLS_WORKERS = "request_kills_workers"
    #: A schema or grammar that no answer can be held to.
    INVALID_GRAMMAR = "invalid_grammar"
    #: One that takes too long, or too much memory.
    GRAMMAR_TOO_COMPLEX = "grammar_too_complex"
    #: The application says so of its task, or cannot do it.
    TASK_FAILED = "task_failed"
    ENGINE_FAILURE = "engine_failure"
    WORKER_LOST = "worker_lost"


class Usage(Report, frozen=True, omit_defaults=True):
    """Token counts of one request; the prompt's include its image and cached tokens."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_image_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0  #: of the output: before the answer's first


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


class PromptLogprob(Report, frozen=True, array_like=True):
    """A token of the prompt and the most probable ones at its position."""

    position: int
    token_id: int
    chosen: TokenLogprob
    rank: int = 0  #: 1: the most probable token of all; 0 for the first token, which has no logprob
    top: tuple[tuple[int, TokenLogprob], ...] = ()  #: with token ids, most probable first


class Started(Report, frozen=True, tag_field="type", tag="started", omit_defaults=True):
    """The engine accepted the prompt, so that the status line may be sent."""

    request_id: str
    attempt: int
    usage: Usage
    prompt_token_ids: tuple[int, ...] = ()  #: where the task asks for them


class CallPiece(Report, frozen=True, array_like=True):
    """What is added to a function call. The first piece of a call has its name, later ones its arguments."""

    index: int  #: of the call in the answer
    name: str = ""
    arguments: str = ""  #: a piece of JSON


def join_calls(pieces: Iterable[CallPiece]) -> tuple[CallPiece, ...]:
    """The same with adjacent pieces of a call's arguments made one."""
    joined: list[CallPiece] = []
    for piece in pieces:
        if joined and not piece.name and piece.index == joined[-1].index:
            last = joined[-1]
            joined[-1] = CallPiece(last.index, last.name, last.arguments + piece.arguments)
        else:
            joined.append(piece)
    return tuple(joined)


class Tokens(Report, frozen=True, tag_field="type", tag="tokens", omit_defaults=True):
    """The next output tokens and the text that they complete (perhaps none yet)."""

    request_id: str
    attempt: int
    index: int  #: how many output tokens came before these
    token_ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[OutputLogprob, ...] = msgspec.field(default=(), name="lp")
    #: Further tokens whose ids the engine does not know, as one behind an API; nobody can continue them.
    num_without_id: int = 0
    reasoning: str = ""  #: what the model thinks before its answer; it stands before the text
    calls: tuple[CallPiece, ...] = ()  #: behind the text
    #: A range of the prompt. All come before the first output token; another attempt may repeat some.
    prompt_logprobs: tuple[PromptLogprob, ...] = msgspec.field(default=(), name="plp")

    @property
    def num_tokens(self) -> int:
        """How many tokens these are."""
        return len(self.token_ids) + self.num_without_id


class Vectors(Report, frozen=True, tag_field="type", tag="vectors", omit_defaults=True):
    """A vector for each input of the call. Shapes: (inputs, dimensions) little-endian float32, row by row."""

    request_id: str
    attempt: int
    dimensions: int
    data: bytes = b""
    is_stored: bool = False  #: the data lies beside the queue, as the result of this attempt


class Scores(Report, frozen=True, tag_field="type", tag="scores", omit_defaults=True):
    """A score for each document of the call. Shapes: (documents) little-endian float32."""

    request_id: str
    attempt: int
    data: bytes = b""
    is_stored: bool = False  #: as of vectors


class Tokenized(Report, frozen=True, tag_field="type", tag="tokenized", omit_defaults=True):
    """What a model's tokenizer makes of a request."""

    request_id: str
    attempt: int
    num_tokens: int = 0
    num_image_tokens: int = 0  #: of these
    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()  #: of each id, as the vocabulary spells it
    text: str = ""  #: of ids


class Finished(Report, frozen=True, tag_field="type", tag="finished", omit_defaults=True):
    """The answer is complete. Terminal."""

    request_id: str
    attempt: int
    finish_reason: FinishReason
    usage: Usage
    timings: StageTimings = StageTimings()
    stopped_by: str = ""  #: which of the client's stop strings ended it


class Failed(Report, frozen=True, tag_field="type", tag="failed", omit_defaults=True):
    """The request ends without a complete answer. Terminal. `message` is fit for the client's eyes."""

    request_id: str
    attempt: int
    code: ErrorCode
    message: str
    param: str | None = None


CallEvent = Started | Tokens | Vectors | Scores | Tokenized | Finished | Failed
