"""What an API says of itself, so that the lifecycle serves it: a `Surface` and its `Answer`.

    bytes -> read -> request -> plan -> Plan -> (lifecycle, fleet) -> events -> Answer -> bytes

All of it is pure: no clock, no I/O. `gateway.api` has the surfaces that are served.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct, field

from gateway.calls.open_call import ChoiceEvent, OpenCall
from gateway.http.body import JsonBody
from gateway.http.endpoint import Endpoint
from gateway.http.errors import ApiError, Headers
from gateway.http.exchange import (
    SSE_HEADERS,
    SSE_KEEP_ALIVE,
    RequestContext,
    sse_event,
    with_sse_id,
)
from gateway.images.loader import ImageSource
from shared.protocol import Finished, ModelCard, Priority, Task, Usage
from shared.records.store import Record
from shared.settings.limits import LimitSettings

#: A position, which counts output tokens and then the frames of the end, and the frame's bytes.
Frame = tuple[int, bytes]

_NO_USAGE = Usage(0)
#: OpenTelemetry's names of fields.
_TRACE_NAMES = {"n": "choice.count"}


class Request(Protocol):
    """A body that was read and checked."""

    @property
    def model(self) -> str:
        """The model that is asked for."""
        ...

    @property
    def user(self) -> str | None:
        """The client's own name for its user; the log holds a short hash of it."""
        ...


class Plan(Struct, frozen=True):
    """What a request asks of the fleet and how its client wants the answer."""

    #: One for each choice or input. A task that takes images has a field `images`, filled in later.
    tasks: Sequence[Task]
    #: The surface's own, for `Surface.answer`; kept in Redis where a stream can be resumed.
    options: msgspec.Struct
    images: Sequence[ImageSource] = ()
    #: Prompts among the tasks, each of which counts once: so many tasks, one after another, have one.
    num_prompts: int = 1
    is_streamed: bool = False
    shows_timings: bool = False
    priority: Priority = Priority.INTERACTIVE


class AnswerHead(Struct, frozen=True):
    """What every piece of one answer repeats."""

    id: str
    #: In epoch seconds.
    created: int
    model: str
    #: The deployment and the digest of what answers, `name@sha256:...`; empty: it was not deployed.
    package: str = ""


class Totals(Struct):
    """What came of a request, once it is complete."""

    #: How each choice ended.
    finished: list[Finished] = field(default_factory=list)
    #: The counts of the prompt, or of all of them together.
    prompt: Usage = _NO_USAGE
    #: Output tokens of all choices.
    num_output_tokens: int = 0
    #: Each stage and the whole, in seconds, where the client asked for them.
    timings: dict[str, float] | None = None


class Answer(Protocol):
    """One answer in the API's words."""

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        """The body of a whole answer, from all its events."""
        ...

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        """The frames of events that arrived together; `totals` come with the last of them."""
        ...


class NoOptions(msgspec.Struct, frozen=True):
    """The options of an answer that needs none."""


class Surface(Endpoint):
    """One API of models: a path, its requests and its answers. Its `name` labels traces and stream records."""

    is_recorded = True
    #: The `name` in traces, where OpenTelemetry's conventions have one for it.
    operation: str = ""
    is_suggested = True
    #: The tag of the tasks that it makes; a model that does not offer it is refused.
    task: str
    #: Begins the id of each answer; the id of the request follows.
    id_prefix: str
    #: The type of `Plan.options`.
    options: type[Struct] = NoOptions
    #: Numbers of the request for its trace.
    traced: Sequence[str] = ()
    #: The limit on the commas of a body.
    commas: str = "max_commas"
    #: Whether its requests may be lines of a batch.
    batchable: bool = False
    #: Whether its answers may be kept, so that later requests continue them.
    keeps_answers: bool = False
    stream_headers: Headers = SSE_HEADERS
    keep_alive: bytes = SSE_KEEP_ALIVE

    def __init__(self, limits: LimitSettings) -> None:
        self.limits = limits
        self.max_commas: int = getattr(limits, self.commas)
        assert self.request_type is not None
        self._body: JsonBody[Any] = JsonBody(self.request_type, self.hints, self.unsupported)

    def read(self, body: bytes, context: RequestContext) -> Any:
        """The `Request`. Raises: InvalidRequest that names the field."""
        return self._body.decode(body, context)

    def plan(self, request: Any, context: RequestContext, card: ModelCard) -> Plan:
        """The tasks for a request. Raises: InvalidRequest that names the field."""
        raise NotImplementedError

    def answer(self, options: Any, head: AnswerHead) -> Answer:
        """The encoder of the events that follow."""
        raise NotImplementedError

    def describe(self, request: Any) -> Mapping[str, Any]:
        """Numbers of the request for its trace, by their names in `gen_ai.request.`; never text."""
        numbers = {_TRACE_NAMES.get(name, name): getattr(request, name) for name in self.traced}
        return numbers | ({"stream": bool(request.stream)} if "stream" in numbers else {})

    def previous(self, request: Any) -> str | None:
        """The id of the kept answer that a request continues."""
        return None

    def without_worker(self, request: Any, head: AnswerHead) -> bytes | None:
        """The answer to a request that needs no worker; None: it needs one."""
        return None

    def go_on(self, request: Any, kept: Record) -> Request:
        """The request, with the kept answer that it continues."""
        return request

    def record(self, answer: Answer) -> bytes | None:
        """The record to keep of a complete answer; None: nothing."""
        return None

    def numbered(self, frame: bytes, position: int) -> bytes:
        """A frame of a resumable stream with its id; the frame itself where frames have no ids."""
        return with_sse_id(frame, position)

    def error_frame(self, error: ApiError, answer: Answer) -> bytes:
        """The last frame of a stream that cannot be completed."""
        return sse_event(error.event())


class Reply(Struct, frozen=True):
    """A call that is open, and how its answer goes back."""

    surface: Surface
    call: OpenCall
    answer: Answer
    is_streamed: bool
    shows_timings: bool
    #: More headers of a stream.
    headers: Headers = field(default_factory=list)
    #: Of the answer.
    id: str = ""
    #: Which package made it; empty: none that was deployed.
    package: str = ""
