"""The interface of an API: `Surface` and `Answer`, which the lifecycle calls.

    bytes -> read -> request -> plan -> Plan -> (lifecycle, fleet) -> events -> Answer -> bytes

Surfaces are pure: no clock, no I/O. They are implemented in `gateway.api`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct, field

from gateway.calls.open_call import ChoiceEvent, OpenCall
from gateway.http.body import JSON, JsonBody
from gateway.http.endpoint import Endpoint
from gateway.http.errors import ApiError, Headers
from gateway.http.exchange import SSE_HEADERS, SSE_KEEP_ALIVE, RequestContext, sse_event
from gateway.media.loader import ImageSource, LoadedImage
from shared.protocol import Finished, ModelCard, Priority, Task, Tokens, Usage
from shared.records.store import Record
from shared.settings.limits import LimitSettings

#: Position and bytes of a frame. The position is the number of output tokens up to its end, 0 before the first token.
#: Frames after the last token have the next numbers. `gateway.api.run` counts items instead of tokens.
Frame = tuple[int, bytes]

_NO_USAGE = Usage(0)
#: Request fields that have another name in OpenTelemetry.
_TRACE_NAMES = {"n": "choice.count"}


class Request(Protocol):
    """A decoded and checked body."""

    @property
    def model(self) -> str: ...

    @property
    def user(self) -> str | None:
        """Identifies the end user; logged as a short hash."""
        ...


class Plan(Struct, frozen=True):
    """The tasks of a request, and options of its answer."""

    #: One per choice or input, without `images`, which the lifecycle adds.
    tasks: Sequence[Task]
    #: Options for `Surface.answer`; stored in Redis for resumable streams.
    options: msgspec.Struct
    images: Sequence[ImageSource] = ()
    #: The content of `images`, if it is loaded already.
    loaded: Sequence[LoadedImage] = ()
    #: Start and end of each task's segment of the audio; empty: the audio is not cut. Units: seconds.
    audio_parts: Sequence[tuple[float, float]] = ()
    #: Number of prompts. Each `len(tasks) // num_prompts` successive tasks have the same prompt, which is billed once.
    num_prompts: int = 1
    is_streamed: bool = False
    shows_timings: bool = False
    priority: Priority = Priority.INTERACTIVE


class AnswerHead(Struct, frozen=True):
    """Fields that every chunk of an answer repeats."""

    id: str
    #: Units: epoch seconds.
    created: int
    model: str
    #: Deployment and digest, `name@sha256:...`; empty if the model is not deployed.
    package: str = ""


class Totals(Struct):
    """Results of a complete request."""

    #: The last event of each choice.
    finished: list[Finished] = field(default_factory=list)
    #: Usage of all prompts.
    prompt: Usage = _NO_USAGE
    #: Output tokens of all choices.
    num_output_tokens: int = 0
    #: Each stage and the total in seconds, if the client asked for them.
    timings: dict[str, float] | None = None


class Answer(Protocol):
    """Encodes one answer in the API's format."""

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes: ...

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        """The frames of events that arrived together; `totals`: only with the last events."""
        ...


class NoOptions(msgspec.Struct, frozen=True):
    """Empty options."""


class Surface(Endpoint):
    """One API: path, requests and answers. `name` labels traces and stream records."""

    is_recorded = True
    #: OpenTelemetry's operation name, if there is one.
    operation: str = ""
    is_suggested = True
    #: Tag of its tasks. Models that don't support the task are refused.
    task: str
    #: Prefix of answer ids; the id of the request follows.
    id_prefix: str
    #: The type of `Plan.options`.
    options: type[Struct] = NoOptions
    #: Numeric fields of the request for its trace.
    traced: Sequence[str] = ()
    #: Field of `LimitSettings` that limits the number of commas in a body.
    commas: str = "max_commas"
    #: Whether a worker cuts the audio of a plan into segments before the plan is queued.
    cuts_audio: bool = False
    batchable: bool = False
    #: Whether answers may be stored, so that later requests continue them.
    keeps_answers: bool = False
    stream_headers: Headers = SSE_HEADERS
    keep_alive: bytes = SSE_KEEP_ALIVE

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits
        self.max_commas: int = getattr(limits, self.commas)
        assert self.request_type is not None
        self._body: JsonBody[Any] = JsonBody(self.request_type, self.hints, self.unsupported)

    def read(self, body: bytes, context: RequestContext) -> Any:
        """Decode a body to a `Request`. Raises: InvalidRequest that names the field."""
        return self._body.decode(body, context)

    def body_type(self, context: RequestContext) -> bytes:
        """The media type of the body. APIs that accept forms override this."""
        return JSON

    def plan(self, request: Any, context: RequestContext, card: ModelCard) -> Plan:
        """The tasks of a request. Raises: InvalidRequest that names the field."""
        raise NotImplementedError

    def cut(self, plan: Plan, segment_ends: Sequence[float]) -> Plan:
        """The plan with a task for each segment of its audio. Raises: InvalidRequest that names the field."""
        raise NotImplementedError

    def answer(self, options: Any, head: AnswerHead) -> Answer:
        raise NotImplementedError

    def describe(self, request: Any) -> Mapping[str, Any]:
        """Numbers of the request for its trace, by their names after `gen_ai.request.`. Never text."""
        numbers = {_TRACE_NAMES.get(name, name): getattr(request, name) for name in self.traced}
        return numbers | ({"stream": bool(request.stream)} if "stream" in numbers else {})

    def previous(self, request: Any) -> str | None:
        """The id of the stored answer that a request continues."""
        return None

    def without_worker(self, request: Any, head: AnswerHead) -> bytes | None:
        """The answer to a request that needs no worker, else None."""
        return None

    def with_previous(self, request: Any, kept: Record) -> Any:
        """The request with the stored answer that it continues, for `plan`."""
        return request

    def record(self, answer: Answer) -> bytes | None:
        """The record to store for a complete answer. None: the answer is not stored."""
        return None

    def numbered(self, frame: bytes, position: int) -> bytes:
        """Add an id to the last event only: a client that is cut off inside the frame gets the whole frame again."""
        begin = frame.rfind(b"\n\nevent: ")
        begin = 0 if begin < 0 else begin + 2
        return frame[:begin] + b"id: %d\n" % position + frame[begin:]

    def error_frame(self, error: ApiError, answer: Answer) -> bytes:
        return sse_event(error.event())


class Reply(Struct, frozen=True):
    surface: Surface
    call: OpenCall
    answer: Answer
    is_streamed: bool
    shows_timings: bool
    head: AnswerHead
    #: Id of the last frame that the client received, -1 before the first one. None: the stream is not resumable.
    last_id: int | None = None

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> bytes:
        """The frames of events that arrived together, without the frames that the client has received."""
        if self.last_id is None:
            return b"".join([data for _, data in self.answer.frames(events, totals)])
        seen = [
            place
            for place, (_, event) in enumerate(events, 1)
            if isinstance(event, Tokens) and event.index + event.num_tokens <= self.last_id
        ]
        # Old and new tokens never share a frame.
        num_seen = seen[-1] if seen else 0
        frames = self.answer.frames(events[:num_seen], None) if num_seen else []
        frames += self.answer.frames(events[num_seen:], totals)
        numbered = self.surface.numbered
        return b"".join([numbered(data, id_) for id_, data in frames if id_ > self.last_id])
