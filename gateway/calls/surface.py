"""What an API says of itself, so that the lifecycle serves it: a `Surface` and its `Answer`.

    bytes -> read -> request -> plan -> Plan -> (lifecycle, fleet) -> events -> Answer -> bytes

All of it is pure: no clock, no I/O. `gateway.api` has the surfaces that are served.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct, field

from gateway.calls.open_call import ChoiceEvent, OpenCall
from gateway.http import sse
from gateway.http.context import RequestContext
from gateway.http.errors import ApiError, Headers
from gateway.images.loader import ImageSource
from shared.protocol import Finished, ModelCard, Priority, Task, Usage
from shared.records.api import Record

#: A position, which counts output tokens and then the frames of the end, and the frame's bytes.
Frame = tuple[int, bytes]

_NO_USAGE = Usage(0)


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


class Surface(Protocol):
    """One API: a path, and the words that are spoken there."""

    #: Of the operation, in metrics and in the records of streams.
    name: str
    #: The same in traces, where OpenTelemetry's conventions have a name for it.
    operation: str = ""
    path: str
    #: Other paths by which clients know it.
    aliases: Sequence[str] = ()
    #: The tag of the tasks that it makes; a model that does not offer it is refused.
    task: str
    #: Begins the id of each answer; the id of the request follows.
    id_prefix: str
    #: The type of `Plan.options`.
    options: type[msgspec.Struct]
    #: Of a body; 0: those of the limits.
    max_commas: int = 0
    #: Whether its requests may be lines of a batch.
    batchable: bool = False
    #: Whether its answers may be kept, so that later requests go on from them.
    keeps_answers: bool = False
    stream_headers: Headers = sse.HEADERS
    keep_alive: bytes = sse.KEEP_ALIVE

    def read(self, body: bytes, context: RequestContext) -> Request:
        """Read the body strictly. Raises: InvalidRequest that names the field."""
        ...

    def plan(self, request: Any, context: RequestContext, card: ModelCard) -> Plan:
        """What to do for the request. Raises: InvalidRequest that names the field."""
        ...

    def answer(self, options: Any, head: AnswerHead) -> Answer:
        """Words for the events that follow."""
        ...

    def openapi(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The operation for the OpenAPI document, and the schemas that it refers to, by name."""
        ...

    def describe(self, request: Any) -> Mapping[str, Any]:
        """Numbers of the request for its trace, by their names in `gen_ai.request.`; never text."""
        return {}

    def previous(self, request: Any) -> str | None:
        """The id of a kept answer from which a request goes on."""
        return None

    def without_worker(self, request: Any, head: AnswerHead) -> bytes | None:
        """The answer to a request that asks a model for nothing; None: it needs a worker."""
        return None

    def go_on(self, request: Any, kept: Record) -> Request:
        """The request, with what was kept of that answer."""
        return request

    def record(self, answer: Answer) -> bytes | None:
        """What to keep of a complete answer; None: nothing."""
        return None

    def error(self, error: ApiError) -> tuple[int, bytes]:
        """The status and the body of an error, where no answer has begun."""
        return error.status, error.body()

    def numbered(self, frame: bytes, position: int) -> bytes:
        """A frame of a resumable stream with its id, by which its client asks for the rest.

        The frame itself where the API's frames have no ids.
        """
        return sse.numbered(frame, position)

    def error_frame(self, error: ApiError, answer: Answer) -> bytes:
        """How a stream of this answer ends, that cannot be completed."""
        return sse.frame(error.event())


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
