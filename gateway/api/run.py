"""`POST /v1/applications/{name}/run`: one task of an application, without a session."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.api.fields import (
    RequestStruct,
    ServiceTier,
    Timings,
    User,
    doc,
    find_priority,
    invalid,
    timings_of,
    wants_timings,
)
from gateway.calls.open_call import ChoiceEvent
from gateway.calls.surface import Answer, AnswerHead, Frame, NoOptions, Plan, Surface, Totals
from gateway.http.errors import ApiError, InvalidRequest
from gateway.http.exchange import SSE_DONE, RequestContext, sse_event
from shared.protocol import CallEvent, ModelCard, Run, RunOutput, Tokens

_lines = msgspec.json.Decoder(RunOutput)


class RunRequest(RequestStruct, frozen=True, kw_only=True):
    input: Annotated[Raw, doc("Any JSON, in the application's own format.")]
    stream: Annotated[bool | None, doc("Send each item when the application yields it.")] = None
    user: User = None
    service_tier: ServiceTier | None = None
    timings: bool | None = None


class RunAnswer(msgspec.Struct):
    id: str
    application: str
    #: The return value of `run`, or the list of its yielded values. In a stream, `item` events precede the output.
    output: Raw | UnsetType = UNSET
    item: Raw | UnsetType = UNSET
    timings: Timings = UNSET
    object: str = "task"


class NamedRequest(msgspec.Struct, frozen=True):
    """A request body, with the application's name from the path as `model`."""

    model: str
    body: RunRequest

    @property
    def user(self) -> str | None:
        return self.body.user


class ApplicationRun(Surface):
    """Run a task of an application."""

    name = "run"
    path = "/v1/applications/{name}/run"
    tag = "applications"
    task = "run"
    id_prefix = "task-"
    request_type = RunRequest
    answer_type = chunk_type = RunAnswer
    commas = "max_task_bytes"

    def read(self, body: bytes, context: RequestContext) -> NamedRequest:
        return NamedRequest(context.path["name"], super().read(body, context))

    def plan(self, request: NamedRequest, context: RequestContext, card: ModelCard) -> Plan:
        body, is_streamed = request.body, bool(request.body.stream)
        data = compact(body.input, "input", self.limits.max_task_bytes)
        return Plan(
            [Run(data, is_streamed=is_streamed)],
            NoOptions(),
            is_streamed=is_streamed,
            shows_timings=wants_timings(body.timings, context.headers),
            priority=find_priority(body.service_tier, context),
        )

    def answer(self, options: NoOptions, head: AnswerHead) -> Answer:
        return TaskAnswer(head)

    def error(self, error: ApiError) -> tuple[int, bytes]:
        """Report the path parameter `name` instead of the field `model`."""
        if error.param == "model":
            error.param = "name"
        return error.status, error.body()


class TaskAnswer:
    """Encodes a task's output, whole or streamed."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head
        self._num_items = 0

    def whole(self, events: Sequence[ChoiceEvent], totals: Totals) -> bytes:
        output = output_of(event for _, event in events)
        return self._encode(output=output, timings=timings_of(totals))

    def frames(self, events: Sequence[ChoiceEvent], totals: Totals | None) -> list[Frame]:
        """One event per yielded item, and a last event with the output."""
        frames: list[Frame] = []
        for line in lines_of(event for _, event in events):
            self._num_items += 1
            if line.item is not UNSET:
                data = self._encode(item=line.item)
            else:
                timings = timings_of(totals) if totals is not None else UNSET
                data = self._encode(output=line.output, timings=timings)
            frames.append((self._num_items, sse_event(data)))
        if totals is not None:
            frames.append((self._num_items + 1, SSE_DONE))
        return frames

    def _encode(self, **fields: Any) -> bytes:
        answer = RunAnswer(self._head.id, self._head.model, **fields)
        return msgspec.json.encode(answer)


def lines_of(events: Iterable[CallEvent]) -> Iterator[RunOutput]:
    """The yielded items and the final output of a task, in order."""
    text = "".join(event.text for event in events if isinstance(event, Tokens))
    return (_lines.decode(line) for line in text.split("\n") if line)


def output_of(events: Iterable[CallEvent]) -> Raw:
    """The list of values that a task yielded, or its return value if it yielded none."""
    lines = list(lines_of(events))
    items = [line.item for line in lines if line.item is not UNSET]
    if items:
        return Raw(msgspec.json.encode(items))
    output = lines[-1].output if lines else UNSET
    return Raw(b"null") if output is UNSET else output


def compact(value: Raw, param: str, max_bytes: int) -> Raw:
    """Remove insignificant whitespace from JSON. Raises: InvalidRequest if it is too large or too deeply nested."""
    if len(memoryview(value)) > max_bytes:
        message = f"{param} is too large: send at most {max_bytes} bytes."
        raise InvalidRequest(message, param=param, code="task_too_large")
    try:
        return Raw(msgspec.json.format(bytes(value), indent=-1))
    except (msgspec.DecodeError, RecursionError):
        raise invalid(param, "send valid JSON with fewer levels of arrays and objects") from None
