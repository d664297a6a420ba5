"""A small HTTP server for probes and metrics: `/healthz`, `/readyz`, `/metrics`.

It answers from the worker's own event loop and asks nobody else: alive is a worker whose engine
moves while it has work, ready is one that takes requests.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

REQUEST_WITHIN_S = 5.0
MAX_REQUEST_BYTES = 8192

Answer = tuple[int, str, bytes]  # status, content type, body
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 503: "Service Unavailable"}


class HealthServer:
    """Answers `GET`. The probes are functions, the metrics a registry; None: not there yet."""

    def __init__(
        self,
        is_alive: Callable[[], bool],
        is_ready: Callable[[], bool],
        registry: Callable[[], CollectorRegistry | Awaitable[CollectorRegistry] | None],
    ) -> None:
        self._is_alive = is_alive
        self._is_ready = is_ready
        self._registry = registry
        self._server: asyncio.Server | None = None
        self.port = 0  #: where it listens, once started

    async def start(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one, and a path as the host a unix socket. Raises: OSError."""
        if host.startswith("/"):
            self._server = await asyncio.start_unix_server(
                self._serve, host, limit=MAX_REQUEST_BYTES
            )
            return
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(REQUEST_WITHIN_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, content_type, body = await self._answer(head)
                writer.write(
                    f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: {content_type}\r\n"
                    f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
        writer.close()

    async def _answer(self, head: bytes) -> Answer:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
            return 400, "text/plain", b"only GET is served here\n"
        path = words[1].split(b"?")[0]
        if path == b"/healthz":
            return _probe(self._is_alive())
        if path == b"/readyz":
            return _probe(self._is_ready())
        if path == b"/metrics":
            registry = self._registry()
            if inspect.isawaitable(registry):
                registry = await registry
            body = generate_latest(registry) if registry is not None else b""
            return 200, CONTENT_TYPE_LATEST, body
        return 404, "text/plain", b"no such page\n"


def _probe(is_good: bool) -> Answer:
    return (200, "text/plain", b"ok\n") if is_good else (503, "text/plain", b"no\n")
