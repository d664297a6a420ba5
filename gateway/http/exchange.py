"""One HTTP exchange: the request's context, the answer, and server-sent events.

JSON contains no raw line breaks, so that no text can break an event.
Source: WHATWG HTML, "Server-sent events".
"""

import hashlib
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime  # noqa: TID251 (a date in a header)

from msgspec import Struct, field
from starlette.types import Message, Receive, Send

from gateway.http.errors import ApiError, Headers, Render
from shared.protocol import Priority

#: Name of an ASGI extension: a function that returns whether `receive` would return without waiting.
HAS_MESSAGE = "vlm.has_message"
_MAX_IGNORED = 10
_MAX_NAME_CHARS = 48
_OTHER_CHARS = re.compile(r"[^A-Za-z0-9_.-]")

JSON_HEADERS: Headers = [(b"content-type", b"application/json")]
SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # disables buffering in proxies
]
SSE_KEEP_ALIVE = b": keep-alive\n\n"
#: Last event of a stream in OpenAI's APIs.
SSE_DONE = b"data: [DONE]\n\n"


class Rate(Struct, frozen=True):
    """A limit per minute of the request's key."""

    name: str  #: `requests` or `tokens`
    limit: int
    remaining: int
    full_in_s: float  #: until the full limit is available again


class RequestContext(Struct):
    """Properties of one request. Units: `received_at` is a reading of `time.perf_counter`."""

    id: str  #: 128 random bits; the request's name in the queue
    headers: dict[bytes, bytes]  #: lower-case names; the last one of repeated headers
    received_at: float
    client_id: str | None = None  #: the client's `x-request-id`, if it is well formed
    tenant: str = ""
    address: str = ""  #: address of the client; empty on a unix socket
    method: str = "POST"
    route: str = ""  #: template of the path; empty for a line of a batch
    path: dict[str, str] = field(default_factory=dict)  #: parameters of the path
    query: bytes = b""
    trace_parent: str | None = None  #: W3C trace context of the caller, later of the gateway's span
    #: Whether an unknown field of the body is an error (`VLM_GATEWAY__UNKNOWN_FIELDS`).
    refuses_unknown_fields: bool = False
    fallback_from: str = ""  #: the requested model, if its fallback answers
    rates: list[Rate] = []
    max_output_tokens: int = 0  #: limit of the key for each answer; 0: no limit
    max_priority: Priority = Priority.INTERACTIVE  #: highest priority that the key may use
    #: Ignored fields of the request, for `x-vlm-ignored`.
    ignored: list[str] = field(default_factory=list)

    @property
    def shown_id(self) -> str:
        """The request id for the client."""
        return self.client_id or "req_" + self.id

    def at_most(self, priority: Priority) -> Priority:
        return Priority.BATCH if Priority.BATCH in (priority, self.max_priority) else priority

    def ignore(self, name: str) -> None:
        if len(self.ignored) < _MAX_IGNORED and name not in self.ignored:
            self.ignored.append(name)


class Exchange:
    """One request and its response. Writes to a disconnected client are discarded."""

    #: Whether `receive` returns without waiting; None: unknown.
    has_message: Callable[[], bool] | None = None

    def __init__(self, context: RequestContext, receive: Receive, send: Send) -> None:
        self.context = context
        self.receive = receive
        self.status: int | None = None  #: the status that was sent, if any
        self._send = send

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.write(body, is_last=True)

    async def fail(self, error: ApiError, render: Render | None = None) -> None:
        """Send an error. `render` is the API's format of errors."""
        error.request_id = self.context.shown_id
        status, body = (error.status, error.body()) if render is None else render(error)
        await self.answer(status, error.headers(), body)

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        headers = [*headers, *self._own_headers()]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body. Waits if the client is slow to read the previous parts."""
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self.start(message["status"], list(message["headers"]))
        else:
            await self._send(message)

    async def wait_until_gone(self) -> None:
        """Return when the client disconnects. Call it after the body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def _own_headers(self) -> Headers:
        context, request_id = self.context, self.context.shown_id.encode()
        headers = [(b"x-request-id", request_id)]
        if b"anthropic-version" in context.headers:  # header name of Anthropic's clients
            headers.append((b"request-id", request_id))
        for rate in context.rates:
            headers += _rate_headers(rate, b"anthropic-version" in context.headers)
        if context.ignored:
            names = dict.fromkeys(map(clean_name, context.ignored))
            headers.append((b"x-vlm-ignored", ", ".join(names).encode()))
        if context.fallback_from:
            name = context.fallback_from.encode("ascii", "backslashreplace")
            headers.append((b"x-vlm-fallback-from", name))
        if context.trace_parent is not None:
            headers.append((b"traceparent", context.trace_parent.encode()))
        return headers


def _rate_headers(rate: Rate, is_anthropic: bool) -> Headers:
    if is_anthropic:
        full_at = time.time() + rate.full_in_s  # noqa: TID251
        reset = datetime.fromtimestamp(full_at, UTC).isoformat(timespec="seconds")
        form, end = f"anthropic-ratelimit-{rate.name}-{{}}", reset.replace("+00:00", "Z")
    else:
        form, end = f"x-ratelimit-{{}}-{rate.name}", f"{rate.full_in_s:.3f}s"
    values = {"limit": str(rate.limit), "remaining": str(rate.remaining), "reset": end}
    return [(form.format(name).encode(), value.encode()) for name, value in values.items()]


def clean_name(name: str) -> str:
    """A client's field name, safe in headers and logs."""
    return _OTHER_CHARS.sub("_", name[:_MAX_NAME_CHARS])


def short_hash(name: str) -> str:
    """A pseudonym of a user or tenant; empty for an empty name."""
    return name and hashlib.blake2b(name.encode(), digest_size=6).hexdigest()


def sse_event(data: bytes, event: bytes = b"") -> bytes:
    """A server-sent event. `event` is its name, if the API names events."""
    if event:
        return b"event: " + event + b"\ndata: " + data + b"\n\n"
    return b"data: " + data + b"\n\n"
