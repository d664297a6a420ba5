"""One HTTP exchange seen from an ASGI application: reads that notice the client leaving, and the
two parts of an answer.
"""

from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

from gateway.http.context import SCOPE_KEY, RequestContext
from gateway.http.errors import Headers
from gateway.http.unknown_fields import header_of


class ClientGone(Exception):
    """The client left; there is nobody to answer."""


class Exchange:
    """The client's end of one request. What is sent to a client that has left goes nowhere."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.context: RequestContext = scope[SCOPE_KEY]
        self.receive = receive
        self.status: int | None = None  #: what the client was told, if anything
        self._send = send

    @property
    def has_started(self) -> bool:
        """Whether the status line is out."""
        return self.status is not None

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.write(body, is_last=True)

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        headers = with_ids(self.context, headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, is_last: bool = False) -> None:
        """Send a piece of the body, once the client has read what came before."""
        await self._send({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def wait_until_gone(self) -> None:
        """Return when the client has left. To be called once the body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


def shown_id(context: RequestContext) -> str:
    """What the client knows the request by: its own id, or ours."""
    return context.client_id or "req_" + context.id


def with_ids(context: RequestContext, headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """An answer's headers, with those that name the request: its id and its span."""
    request_id = shown_id(context).encode()
    named = [*headers, (b"x-request-id", request_id)]
    if b"anthropic-version" in context.headers:  # whose clients know it by this name
        named.append((b"request-id", request_id))
    if context.ignored:
        named.append(header_of(context))
    if context.trace_parent is not None:
        named.append((b"traceparent", context.trace_parent.encode()))
    return named
