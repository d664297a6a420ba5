"""One HTTP exchange seen from an ASGI application: reads that notice the client leaving, writes that time out.

It must not know what is said.
"""

import asyncio
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from gateway.errors import Headers

ABORT_KEY = "vlm.abort"  #: in the scope: a function that drops the connection at once


class ClientGone(Exception):
    """The client left or does not read; there is nobody to answer."""


class Exchange:
    """The client's end of one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, send_timeout_s: float) -> None:
        self.receive = receive
        self.status: int | None = None  #: what the client was told, if anything
        self._send = send
        self._send_timeout_s = send_timeout_s
        self._abort: Callable[[], None] | None = scope.get(ABORT_KEY)

    @property
    def has_started(self) -> bool:
        """Whether the status line is out."""
        return self.status is not None

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response. Raises: ClientGone if the client does not read it."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.write(body, is_last=True)

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status line."""
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, body: bytes, *, is_last: bool = False) -> None:
        """Send a piece of the body. Raises: ClientGone if the client does not read it."""
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._send(
                    {"type": "http.response.body", "body": body, "more_body": not is_last}
                )
        except (TimeoutError, OSError):
            if self._abort is not None:
                self._abort()
                await asyncio.sleep(0)  # the server notices that the connection is lost
            raise ClientGone from None

    async def wait_until_gone(self) -> None:
        """Return when the client has left. To be called once the body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass
