"""The HTTP server: uvicorn with limits on the memory and time that clients can use, and graceful shutdown.

uvicorn's parser accepts headers and trailers of any size, and waits without limit for requests and for clients to
read; this server limits all of them. On SIGTERM it refuses new requests but still accepts connections, so that
`/readyz` returns 503 and open requests finish.

A client that closes its sending half is treated as disconnected, as in most servers, and its request is cancelled.
"""

import asyncio
import logging
import resource
import sys
import time
from asyncio import TimerHandle
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.http.body import Admission
from gateway.http.errors import InvalidRequest
from gateway.http.exchange import HAS_MESSAGE
from shared.settings.tree import Settings
from shared.telemetry.metrics import GatewayMetrics

_STATUS_LINE = b"HTTP/1.1 "
_BODY_GRACE_S = 1.0  #: extra time, so that the application can report a slow body first
_LAST_WORDS_S = 2.0  #: time to send the error events of requests that outlast the drain

RESERVED_FILES = 64  #: file descriptors that are not for client connections
_WARN_EVERY_S = 10.0

logger = logging.getLogger(__name__)


class FileReserve:
    """Reserves file descriptors for Redis, remote images and files."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._last_warned_at = float("-inf")

    def admits(self, transport: asyncio.Transport) -> bool:
        """Whether a connection leaves enough file descriptors. Refusals are counted, and logged at intervals."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        file = transport.get_extra_info("socket").fileno()  # the lowest free number, by POSIX
        if limit == resource.RLIM_INFINITY or file < limit - min(RESERVED_FILES, limit // 4):
            return True
        self._metrics.count("admission_rejections", "connections")
        if time.monotonic() - self._last_warned_at > _WARN_EVERY_S:
            self._last_warned_at = time.monotonic()
            logger.warning("connections are refused: too few file descriptors (ulimit -n)")
        return False


class NotServed(Exception):
    """Raised in a callback of the parser, to answer 400."""


class BoundedTransport:
    """A transport that writes immediately, joins the status line with the body, and drops clients that do not read.

    After `close`, the client has `send_timeout_s` to read the remaining data.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, send_timeout_s: float
    ) -> None:
        transport.set_write_buffer_limits(0)  # otherwise uvloop delays small writes
        self._transport = transport
        self._loop = loop
        self._send_timeout_s = send_timeout_s
        self._head = b""  #: status line that waits for its body, within one iteration of the loop
        self.get_extra_info = transport.get_extra_info
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write data. A status line waits for its body, because two writes would wake the client twice."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(_STATUS_LINE):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def close(self) -> None:
        self._flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self._loop.call_later(self._send_timeout_s, self._transport.abort)


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol with limits on headers, trailers, and the time of headers, bodies and answers.

    Trailers are discarded: uvicorn would merge them into the headers, unseen by any proxy.
    """

    _in_headers = False
    _in_body = False
    _problem = ""  #: why this class stopped the parser
    #: bytes of incomplete headers, or of chunk headers and trailers
    _num_received = 0
    _num_trailers = 0
    _read = b""
    _without_upgrade = b""  #: head of a request without its `Upgrade`
    _num_trailer_bytes = 0
    _has_ended = False  #: whether the last read contained the end of a request
    _timer: TimerHandle | None = None  #: closes a connection without a request
    _times_body = False  #: whether the timer is for a body
    _is_body_silent = False  #: no byte of the body since the timer was set
    _send_timer: TimerHandle | None = None  #: closes a connection whose client does not read

    def __init__(
        self, *arguments: Any, settings: Settings, files: FileReserve, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        self._files = files
        self._limits = settings.limits
        self._header_timeout_s = settings.gateway.header_timeout_s
        self._body_timeout_s = settings.gateway.body_timeout_s + _BODY_GRACE_S
        self._send_timeout_s = settings.gateway.send_timeout_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the headers, or close the connection if too few file descriptors are left."""
        if not self._files.admits(transport):
            transport.abort()
        bounded = BoundedTransport(transport, self.loop, self._send_timeout_s)
        super().connection_made(bounded)  # type: ignore[arg-type]
        self._set_timer(self._header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start a timer that closes the connection if the client does not read, which ends the request."""
        super().pause_writing()
        self._send_timer = self.loop.call_later(self._send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse data. Size and time of incomplete data are limited."""
        if self.transport.is_closing():
            return
        self._has_ended = False
        self._num_received += len(data)
        self._read = data
        super().data_received(data)
        self._read = b""
        if self._has_ended:  # do not count this read: it also has data of the previous request
            self._num_received = 0
        if self.transport.is_closing():
            return
        if self._num_received > self._limits.max_header_bytes:
            self._problem = self._too_large("headers" if self._in_headers else "trailers")
            self.send_400_response(self._problem)
        elif self._in_headers:
            if self._timer is None or self._times_body:
                self._set_timer(self._header_timeout_s)
        elif not self._in_body:
            self._stop_timer()
        elif not self._times_body:
            self._time_body()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._in_body, self._num_received = True, False, 0
        self._num_trailers = self._num_trailer_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header, or count and discard a trailer. Raises: NotServed."""
        if self._in_headers:
            super().on_header(name, value)
            return
        self._num_trailers += 1
        self._num_trailer_bytes += len(name) + len(value)
        limits = self._limits
        if (
            self._num_trailers > limits.max_headers
            or self._num_trailer_bytes > limits.max_header_bytes
        ):
            raise self._not_served(self._too_large("trailers"))

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body. The number of bytes between two pieces is limited."""
        self._num_received = 0
        self._is_body_silent = False
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request. The next one may begin in the same read."""
        if self._without_upgrade:
            return
        self._has_ended, self._in_body = True, False
        super().on_message_complete()

    def on_headers_complete(self) -> None:
        """Check the headers and start the application. Raises: NotServed."""
        is_split = self._num_received > 0  # the headers came in several reads
        self._in_headers, self._in_body, self._num_received = False, True, 0
        limits, size = self._limits, 0
        if is_split or len(self._read) > limits.max_header_bytes:  # otherwise below the limit
            size = len(self.url) + sum([len(name) + len(value) for name, value in self.headers])
        if size > limits.max_header_bytes or len(self.headers) > limits.max_headers:
            raise self._not_served(self._too_large("headers"))
        assert self.parser is not None  # the parser calls this method
        if self._ignore_upgrade():
            return
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise self._not_served("Unsupported HTTP version: send HTTP/1.1 or HTTP/1.0.")
        encodings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if encodings and (
            version == "1.0" or [e.strip().lower() for e in encodings] != [b"chunked"]
        ):
            raise self._not_served("Unsupported Transfer-Encoding: send chunked, in HTTP/1.1.")
        super().on_headers_complete()
        self.scope["extensions"] = {HAS_MESSAGE: self.cycle.message_event.is_set}  # type: ignore[dict-item]
        if self.scope["http_version"] == "1.0":
            self.cycle.send = without_chunks(self.cycle)  # type: ignore[method-assign]

    def _ignore_upgrade(self) -> bool:
        """Store the request's head without `Upgrade`. Returns whether it had this header.

        The parser stops at an upgrade, but a server that ignores it must read on (RFC 9110, section 7.8).
        """
        assert self.parser is not None
        if not self.parser.should_upgrade():
            return False
        if self.parser.get_method() == b"CONNECT":
            raise self._not_served("CONNECT is not supported: this server is not a proxy.")
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(t for t in tokens if t.lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(b"%b: %b" % (name, value))
        self._without_upgrade = b"\r\n".join([*lines, b"", b""])
        return True

    def _unsupported_upgrade_warning(self) -> None:
        """Continue without the upgrade, and without uvicorn's warning."""
        stop = sys.exc_info()[1]
        assert isinstance(stop, httptools.HttpParserUpgrade)
        head, self._without_upgrade = self._without_upgrade, b""
        rest = self._read[stop.args[0] :]
        self.parser = httptools.HttpRequestParser(self)  # type: ignore[assignment]
        super().data_received(head + rest)

    def _not_served(self, problem: str) -> NotServed:
        self._problem = problem
        return NotServed(problem)

    def _too_large(self, part: str) -> str:
        limits = self._limits
        count, size = limits.max_headers, limits.max_header_bytes
        return f"Too many {part}: send at most {count}, with at most {size} bytes in total."

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP in the format of other errors. Closes the connection if an answer has begun."""
        cycle = self.cycle
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.transport.abort()
            return
        error = InvalidRequest(self._problem or msg, code="invalid_http")
        body = error.body()
        head = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: %d\r\n" % len(
            body
        )
        fields = b"".join(b"%b: %b\r\n" % field for field in error.headers())
        self.transport.write(head + fields + b"\r\n" + body)
        self.transport.close()

    def _set_timer(self, timeout_s: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(timeout_s, self.transport.close)

    def _time_body(self) -> None:
        """Close a connection whose body stops. The application limits the rate of a body."""
        self._stop_timer()
        self._times_body, self._is_body_silent = True, True
        self._timer = self.loop.call_later(self._body_timeout_s, self._end_body)

    def _end_body(self) -> None:
        is_unread = self.cycle is None or self.cycle.response_complete
        if is_unread or (self._is_body_silent and not self.flow.read_paused):
            self.transport.close()
        else:
            self._time_body()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._times_body = False

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


def without_chunks(cycle: RequestResponseCycle) -> Send:
    """The `send` for HTTP/1.0, which has no chunks: an answer of unknown length ends with the connection."""
    send_plain, has_length = cycle.send, False

    async def send(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send_plain(message)

    return send


class DrainingServer(uvicorn.Server):
    """A uvicorn server that finishes open requests before it stops. `fail_open` fails requests that take too long."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        admission: Admission,
        metrics: GatewayMetrics,
        fail_open: Callable[[str], None],
    ) -> None:
        gateway, files = settings.gateway, FileReserve(metrics)
        config = uvicorn.Config(
            app,
            host=gateway.host,
            port=gateway.port,
            http=partial(BoundedHttpProtocol, settings=settings, files=files),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=bool(gateway.trusted_proxies),
            forwarded_allow_ips=list(gateway.trusted_proxies),
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_LAST_WORDS_S,  # type: ignore[arg-type]
        )
        super().__init__(config)
        self.admission = admission
        self.fail_open = fail_open
        self.drain_s = gateway.drain_s
        self._drain_until = float("inf")

    @property
    def port(self) -> int:
        return self.servers[0].sockets[0].getsockname()[1]

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        logger.info("gateway listens on http://%s:%d", host, self.port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins the drain, the second ends it."""
        if self.admission.is_draining:
            self.should_exit = self.force_exit = True
            return
        self.admission.is_draining = True
        self._drain_until = time.monotonic() + self.drain_s

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop; called ten times per second."""
        if self.admission.is_draining:
            if self.admission.num_open == 0:
                self.should_exit = True
            elif time.monotonic() > self._drain_until:
                self.fail_open("The server is shutting down.")
                self.should_exit = True
        return await super().on_tick(counter)
