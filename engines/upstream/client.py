"""HTTP streams of one server, read by a separate thread.

Any thread starts and cancels streams; the engine's thread receives their events. The health of the server is checked
when a stream breaks, and after `silence_s` without data, also while no stream is open.
"""

import asyncio
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Literal

import httptools
import httpx
import msgspec
import uvloop

CONNECT_TIMEOUT_S = 10.0
HEALTH_TIMEOUT_S = 5.0
WATCH_EVERY_S = 1.0
END_S = 0.1  #: time after which a stream that ended without its last event counts as broken
HOLD_S_PER_STREAM = 0.0001  #: delay of events, so that one wakeup of the engine delivers several
DONE = b"[DONE]"  #: data of a stream's last event
_DATA = re.compile(rb"(?:\xef\xbb\xbf)?data:(.*)")  # a stream may begin with a BOM
_SAMPLE = re.compile(rb"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? ([-+.\deE]+)$", re.M)


class StreamEvent(msgspec.Struct, frozen=True):
    """Data, or the end of a stream: `refused` with an error response, or `broken` while the server is healthy."""

    stream_id: str
    kind: Literal["data", "refused", "broken"]
    data: bytes = b""
    status: int = 0


class ServerLost(Exception):
    """The server fails its health check."""


class Connection(asyncio.Protocol):
    """A keep-alive connection. Its parser is in C, because httpx takes several times the CPU time per event."""

    _transport: Any
    _done: asyncio.Future[bool]
    _receive: Callable[[int, bytes], None]
    _parser: httptools.HttpResponseParser

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    async def send(self, request: httpx.Request, receive: Callable[[int, bytes], None]) -> bool:
        """Send a request; pass status and each piece of the body to `receive`. Returns whether to reuse the connection.

        Raises: OSError, httptools.HttpParserError.
        """
        self._done, self._receive = asyncio.get_running_loop().create_future(), receive
        self._parser = httptools.HttpResponseParser(self)
        head = b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)
        fields = [b"%b: %b" % field for field in request.headers.raw]
        self._transport.write(b"\r\n".join([head, *fields, b"", request.content]))
        return await self._done

    @property
    def status(self) -> int:
        return self._parser.get_status_code()

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def close(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._done.done():  # no request is open
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not self._done.done():
                self._done.set_exception(error)

    def on_body(self, body: bytes) -> None:
        self._receive(self.status, body)

    def on_message_complete(self) -> None:
        if not self._done.done():
            self._done.set_result(self._parser.should_keep_alive())

    def connection_lost(self, exc: Exception | None) -> None:
        """Closing without an error completes a response of unknown length, and truncates any other response."""
        if not self._done.done():
            if exc is None and self.status:
                self._done.set_result(False)
            else:
                self._done.set_exception(exc or ConnectionResetError("the server disconnected"))


class UpstreamClient:
    def __init__(
        self,
        url: str,
        api_key: str,
        max_streams: int,
        silence_s: float,
        health_path: str,
        metrics_path: str = "",
    ) -> None:
        """`metrics_path` is read once a second; empty: never."""
        self.url = url
        self.metrics: Mapping[str, float] = {}  #: Prometheus samples, summed over their labels
        self.health_path = health_path
        self._silence_s = silence_s
        self._metrics_path = metrics_path
        self._events: SimpleQueue[list[StreamEvent]] = SimpleQueue()
        self._held: list[StreamEvent] = []  # to deliver together; used by the client's thread only
        self.lost = ""  #: why the server is lost; empty while it is healthy
        self.is_ready = False  #: set after the server's start, which may take long
        self._streams: dict[str, asyncio.Task[None]] = {}  # from here on, for the client's thread
        self._received_at: dict[str, float] = {}  # `time.monotonic` by stream
        self._aborting: set[asyncio.Task[None]] = set()
        self._idle: list[Connection] = []  # connections to use again
        self._tls = httpx.create_ssl_context(trust_env=False) if url.startswith("https:") else None
        self._client = httpx.AsyncClient(
            base_url=url,
            verify=self._tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),  # loads no certificates
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=False,
            timeout=httpx.Timeout(CONNECT_TIMEOUT_S, read=None),
            limits=httpx.Limits(max_connections=max_streams + 4),
        )
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="upstream", daemon=True)
        self._thread.start()

    # Methods for any thread

    def start(self, stream_id: str, path: str, body: bytes, delay_s: float = 0.0) -> None:
        self._loop.call_soon_threadsafe(self._start, stream_id, path, body, delay_s)

    def cancel(self, stream_id: str, abort: tuple[str, object] | None = None) -> None:
        """Close a stream, which aborts its request at the server. Pending events may still arrive.

        `abort`: path and JSON of a call that aborts the request immediately, for servers that react to closing later.
        """
        self._loop.call_soon_threadsafe(self._cancel, stream_id, abort)

    def wake(self) -> None:
        self._events.put([])

    def request(
        self, method: str, path: str, *, timeout_s: float = 10.0, json: object = None
    ) -> httpx.Response:
        """Send a request and return the whole response. Raises: httpx.HTTPError."""
        sent = self._client.request(method, path, timeout=timeout_s, json=json)
        return asyncio.run_coroutine_threadsafe(sent, self._loop).result()

    # Methods for the engine's thread

    def receive(self, timeout_s: float) -> list[StreamEvent]:
        """Wait for events, or for `wake`. Raises: ServerLost."""
        events: list[StreamEvent] = []
        with suppress(Empty):
            events += self._events.get(timeout=timeout_s)
            while True:
                events += self._events.get_nowait()
        if self.lost:
            raise ServerLost(self.lost)
        return events

    def close(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(HEALTH_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(HEALTH_TIMEOUT_S)

    # Methods for the client's thread

    def _run(self) -> None:
        watcher = self._loop.create_task(self._watch())
        self._loop.run_forever()
        del watcher
        self._loop.close()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._idle:
            connection.close()
        await self._client.aclose()

    def _start(self, stream_id: str, path: str, body: bytes, delay_s: float) -> None:
        stream = self._stream(stream_id, path, body, delay_s)
        self._streams[stream_id] = self._loop.create_task(stream)

    def _cancel(self, stream_id: str, abort: tuple[str, object] | None) -> None:
        if task := self._streams.pop(stream_id, None):
            task.cancel()
            if abort is not None:
                aborting = self._loop.create_task(self._abort(*abort))
                self._aborting.add(aborting)
                aborting.add_done_callback(self._aborting.discard)

    async def _abort(self, path: str, body: object) -> None:
        with suppress(httpx.HTTPError):  # closing the stream aborts the request, too
            await self._client.post(path, json=body, timeout=HEALTH_TIMEOUT_S)

    async def _stream(self, stream_id: str, path: str, body: bytes, delay_s: float) -> None:
        try:
            await asyncio.sleep(delay_s)
            self._received_at[stream_id] = time.monotonic()
            await self._read(stream_id, path, body)
        except (OSError, httptools.HttpParserError) as error:
            await self._report_break(stream_id, f"{type(error).__name__}: {error}")
        finally:
            self._streams.pop(stream_id, None)
            self._received_at.pop(stream_id, None)

    async def _read(self, stream_id: str, path: str, body: bytes) -> None:
        refusal = rest = b""

        def receive(status: int, piece: bytes) -> None:
            nonlocal refusal, rest
            self._received_at[stream_id] = time.monotonic()
            if status != httpx.codes.OK:
                refusal += piece
                return
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if (found := _DATA.match(line)) and (data := found[1].strip()):
                    self._put(StreamEvent(stream_id, "data", data))

        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        request = self._client.build_request("POST", path, content=body, headers=headers)
        connection = await self._connect(request.url)
        is_reusable = False
        try:
            is_reusable = await connection.send(request, receive)
        finally:
            if is_reusable:
                self._idle.append(connection)
            else:
                connection.close()
        if connection.status != httpx.codes.OK:
            self._put(StreamEvent(stream_id, "refused", refusal, connection.status))
            return
        await asyncio.sleep(END_S)  # the engine cancels the stream if the answer is complete
        await self._report_break(stream_id, "the stream ended early")

    async def _connect(self, url: httpx.URL) -> Connection:
        """A connection that a request has left open, or a new one. Raises: OSError."""
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        port = url.port or (80 if self._tls is None else 443)
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            made = await self._loop.create_connection(Connection, url.host, port, ssl=self._tls)
        return made[1]

    def _put(self, event: StreamEvent) -> None:
        """Deliver an event together with the next ones, because waking the engine's thread is expensive."""
        if not self._held:
            self._loop.call_later(len(self._streams) * HOLD_S_PER_STREAM, self._flush)
        self._held.append(event)

    def _flush(self) -> None:
        held, self._held = self._held, []
        self._events.put(held)

    async def _report_break(self, stream_id: str, reason: str) -> None:
        """Report a failed stream, or that the server is lost."""
        if await self._is_healthy():
            self._put(StreamEvent(stream_id, "broken", reason.encode()))
        else:
            self._lose(reason)

    async def _watch(self) -> None:
        checked_at = time.monotonic()
        while True:
            await asyncio.sleep(min(WATCH_EVERY_S, self._silence_s))
            if self._metrics_path:
                await self._read_metrics()
            oldest = min(self._received_at.values(), default=checked_at)
            if self.is_ready and time.monotonic() - oldest > self._silence_s:
                if not await self._is_healthy():
                    self._lose(f"no data for {self._silence_s:g} s")
                checked_at = now = time.monotonic()
                for stream_id in self._received_at:
                    self._received_at[stream_id] = now

    async def _is_healthy(self) -> bool:
        try:
            response = await self._client.get(self.health_path, timeout=HEALTH_TIMEOUT_S)
        except httpx.HTTPError:
            return False
        return response.status_code == httpx.codes.OK

    def _lose(self, reason: str) -> None:
        self.lost = reason
        self.wake()

    async def _read_metrics(self) -> None:
        try:
            response = await self._client.get(self._metrics_path, timeout=HEALTH_TIMEOUT_S)
        except httpx.HTTPError:
            return
        found: dict[str, float] = {}
        for name, value in _SAMPLE.findall(response.content):
            found[name.decode()] = found.get(name.decode(), 0.0) + float(value)
        self.metrics = found
