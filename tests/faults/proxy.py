"""A TCP proxy with network faults: delays, lost replies, silence, resets.

It stands between processes and Redis, and inspects the bytes only to find the command whose reply is lost.
"""

import asyncio
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

CHUNK = 65536


class FaultProxy:
    """Forwards connections from `port` to a unix socket, with the faults that tests request."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.port = 0
        self.latency_s = 0.0
        self.bytes_per_s = 0.0  #: limit for commands of all connections; 0: unlimited
        self._line_is_free_at = 0.0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._lost_after = b""
        self._is_lost = asyncio.Event()
        self._is_lossy: set[asyncio.StreamWriter] = set()  # connections whose next reply is lost
        self._is_half_open: set[asyncio.StreamWriter] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def drop_next_reply(self, after: bytes) -> asyncio.Event:
        """Forwards the next command with these bytes, drops its reply and the connection, and then sets the event."""
        self._lost_after, self._is_lost = after, asyncio.Event()
        return self._is_lost

    def freeze(self) -> None:
        """Keeps every connection open and forwards nothing, in either direction."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Forwards what was held back, and all that follows."""
        self._flowing.set()

    def half_open(self) -> None:
        """Drops everything on the current connections, in both directions; new connections work."""
        self._is_half_open |= self._clients

    def reset(self) -> None:
        """Ends every connection with an RST."""
        for client in list(self._clients):
            sock = client.get_extra_info("socket")
            with suppress(OSError):  # already closed
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_unix_connection(str(self.target))
        except OSError:
            client.transport.abort()
            return
        self._clients.add(client)
        up = asyncio.create_task(self._send_commands(reader, up_writer, client))
        down = asyncio.create_task(self._send_replies(up_reader, client))
        self._tasks |= {up, down}
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        for task in (up, down):
            task.cancel()
        for writer in (client, up_writer):
            writer.transport.abort()
        self._clients.discard(client)
        self._is_lossy.discard(client)
        self._is_half_open.discard(client)
        self._tasks -= {up, down}

    async def _send_commands(
        self,
        reader: asyncio.StreamReader,
        redis: asyncio.StreamWriter,
        client: asyncio.StreamWriter,
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._delay()
                await self._throttle(len(data))
                if client in self._is_half_open:
                    continue
                if self._lost_after and self._lost_after in data:
                    self._lost_after = b""
                    self._is_lossy.add(client)
                redis.write(data)
                await redis.drain()

    async def _send_replies(
        self, redis: asyncio.StreamReader, client: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await redis.read(CHUNK):
                if client in self._is_lossy:
                    self._is_lost.set()
                    return
                await self._delay()
                if client in self._is_half_open:
                    continue
                client.write(data)
                await client.drain()

    async def _delay(self) -> None:
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        await self._flowing.wait()

    async def _throttle(self, num_bytes: int) -> None:
        """All connections share one line."""
        if self.bytes_per_s:
            now = time.monotonic()
            self._line_is_free_at = max(now, self._line_is_free_at) + num_bytes / self.bytes_per_s
            if self._line_is_free_at - now > 0.005:  # shorter sleeps last longer than requested
                await asyncio.sleep(self._line_is_free_at - now)

    async def close(self) -> None:
        self.thaw()
        self.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def run_proxy(target: Path) -> AsyncIterator[FaultProxy]:
    proxy = FaultProxy(target)
    listening = socket.socket()
    # Otherwise loopback buffers megabytes that a sender considers delivered; connections inherit the option.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, CHUNK)
    listening.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(proxy._serve, sock=listening)
    proxy.port = listening.getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
        await server.wait_closed()
