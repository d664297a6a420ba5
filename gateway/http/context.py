"""What the door knows of a request before its body is read, and the middleware that notes it.

Outermost of the chain: starts the clock, names the request in log lines, puts `x-request-id` on
every answer.
"""

import re
import secrets
import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.telemetry.logs import request_id
from shared.telemetry.trace_context import parse_trace_parent

SCOPE_KEY = "vlm.context"

_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


@dataclass(slots=True)
class RequestContext:
    """Notes on one HTTP request. Units: `received_at` is a reading of `time.perf_counter`."""

    id: str  #: ours, 128 random bits; names the request in the queue
    headers: dict[bytes, bytes]  #: names in lower case; of repeated ones the last
    received_at: float
    client_id: str | None = None  #: the client's own `x-request-id`, where it sent a sane one
    tenant: str = ""
    trace_parent: str | None = None  #: W3C: the caller's span, then the one that we made below it


def context_of(scope: Scope) -> RequestContext:
    """The notes that the outermost middleware took."""
    return scope[SCOPE_KEY]


class ContextMiddleware:
    """Pure ASGI: notes the request's start and headers, answers with its id."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a `RequestContext` in its scope."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        context = RequestContext(secrets.token_hex(16), headers, time.perf_counter())
        scope[SCOPE_KEY] = context
        if (caller := headers.get(b"traceparent")) is not None:
            context.trace_parent = parse_trace_parent(caller)
        request_id.set(context.id)  # each request is a task of its own
        shown_id = headers.get(b"x-request-id", b"")
        if _SANE_ID.fullmatch(shown_id):
            context.client_id = shown_id.decode()
        else:
            shown_id = b"req_" + context.id.encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", shown_id)]
                if context.trace_parent is not None:
                    message["headers"].append((b"traceparent", context.trace_parent.encode()))
            await send(message)

        await self.app(scope, receive, send_with_id)
