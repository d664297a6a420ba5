"""HTTP streams of one server, read by a thread of their own.

Any thread starts and cancels streams; the engine's thread receives their events. The health of the server is checked
when a stream breaks, and after `silence_s` without data, also while no stream is open.
"""

import asyncio
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Literal

import httpx
import msgspec
import uvloop

HEALTH_TIMEOUT_S = 5.0
WATCH_EVERY_S = 1.0
END_S = 0.1  #: until a stream that ended is taken for broken
HOLD_S_PER_STREAM = 0.0001  #: 6 ms with 64 streams
_DATA = b"data:"
_SAMPLE = re.compile(rb"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? ([-+.\deE]+)$", re.M)


class StreamEvent(msgspec.Struct, frozen=True):
    """One server-sent event, or the end of a stream.

    `refused`: the server answered `status` and `data`. `broken`: the stream ended, but the server is healthy.
    """

    stream_id: str
    kind: Literal["data", "refused", "broken"]
    data: bytes = b""
    status: int = 0


class ServerLost(Exception):
    """The server fails its health check."""


class UpstreamClient:
    """Connections to one server."""

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
        self._silence_s, self._health_path = silence_s, health_path
        self._metrics_path = metrics_path
        self._events: SimpleQueue[list[StreamEvent]] = SimpleQueue()
        self._held: list[StreamEvent] = []  # of the thread, to be received together
        self.lost = ""  #: why the server is lost; empty: it is not
        self.is_ready = False  #: set after the server's start, which may take long
        self._streams: dict[str, asyncio.Task[None]] = {}  # of the thread, like the rest
        self._received_at: dict[str, float] = {}  # by stream, `time.monotonic`
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=False,
            timeout=httpx.Timeout(10.0, read=None),
            limits=httpx.Limits(max_connections=max_streams + 4),
        )
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="upstream", daemon=True)
        self._thread.start()

    # Any thread

    def start(self, stream_id: str, path: str, body: bytes, delay_s: float = 0.0) -> None:
        """Post a body and receive the events of its stream."""
        self._loop.call_soon_threadsafe(self._start, stream_id, path, body, delay_s)

    def cancel(self, stream_id: str) -> None:
        """Close a stream, which aborts its request at the server. Pending events may still arrive."""
        self._loop.call_soon_threadsafe(self._cancel, stream_id)

    def wake(self) -> None:
        """Make `receive` return."""
        self._events.put([])

    def request(
        self, method: str, path: str, *, timeout_s: float = 10.0, json: object = None
    ) -> httpx.Response:
        """Send a request and return the whole response. Raises: httpx.HTTPError."""
        sent = self._client.request(method, path, timeout=timeout_s, json=json)
        return asyncio.run_coroutine_threadsafe(sent, self._loop).result()

    # The engine's thread

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
        """Close all streams. Idempotent."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(HEALTH_TIMEOUT_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(HEALTH_TIMEOUT_S)

    # The thread

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
        await self._client.aclose()

    def _start(self, stream_id: str, path: str, body: bytes, delay_s: float) -> None:
        stream = self._stream(stream_id, path, body, delay_s)
        self._streams[stream_id] = self._loop.create_task(stream)

    def _cancel(self, stream_id: str) -> None:
        if task := self._streams.pop(stream_id, None):
            task.cancel()

    async def _stream(self, stream_id: str, path: str, body: bytes, delay_s: float) -> None:
        try:
            await asyncio.sleep(delay_s)
            self._received_at[stream_id] = time.monotonic()
            await self._read(stream_id, path, body)
        except httpx.HTTPError as error:
            await self._report_break(stream_id, f"{type(error).__name__}: {error}")
        finally:
            if self._streams.get(stream_id) is asyncio.current_task():
                del self._streams[stream_id]
                self._received_at.pop(stream_id, None)

    async def _read(self, stream_id: str, path: str, body: bytes) -> None:
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        async with self._client.stream("POST", path, content=body, headers=headers) as response:
            if response.status_code != httpx.codes.OK:
                data = await response.aread()
                self._put(StreamEvent(stream_id, "refused", data, response.status_code))
                return
            rest = b""
            async for piece in response.aiter_raw():
                self._received_at[stream_id] = time.monotonic()
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(_DATA):
                        data = line[len(_DATA) :].strip()
                        self._put(StreamEvent(stream_id, "data", data))
        await asyncio.sleep(END_S)  # usually the request is done, and its stream is cancelled now
        await self._report_break(stream_id, "the stream ended early")

    def _put(self, event: StreamEvent) -> None:
        """Hand an event over, with those that arrive meanwhile if many streams are open: waking a thread is expensive."""
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
            response = await self._client.get(self._health_path, timeout=HEALTH_TIMEOUT_S)
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
