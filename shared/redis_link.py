"""One connection to Redis on which many commands travel at once, and the gathering of them.

redis-py spends more on a command than Redis does. Here all commands of a loop turn are one write, hiredis
packs and parses, and one timer guards the whole exchange. Addresses and credentials come from redis-py's
client; nothing here knows keys or what scripts mean.
"""

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import hiredis
from redis.asyncio import Redis, SSLConnection
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    NoScriptError,
    OutOfMemoryError,
    ResponseError,
    TimeoutError,
)

from shared.scripts import Script

Part = str | bytes | int
Command = Sequence[Part]
Done = Callable[[list[Any] | Exception], None]
Call = tuple[Command, asyncio.Future[Any]]

_ERRORS: dict[str, type[Exception]] = {
    "NOSCRIPT": NoScriptError,
    "OOM": OutOfMemoryError,
    "LOADING": BusyLoadingError,  # a ConnectionError: it goes away by itself
    "READONLY": ConnectionError,  # this server is a replica now; connecting again finds the primary
}


#: hiredis declares a tuple of one part; any number is right.
_pack: Callable[[tuple[Part, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]


def _to_error(message: str) -> Exception:
    kind, _, rest = message.partition(" ")
    if kind in _ERRORS:
        return _ERRORS[kind](message)
    return ResponseError(rest if kind == "ERR" else message)


class _Wire(asyncio.Protocol):
    """Replies in the order of the commands; one exchange at a time."""

    def __init__(self) -> None:
        self._parser = hiredis.Reader(replyError=_to_error)
        self._replies: list[Any] = []
        self._num_wanted = 0
        self._done: Done | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Whether commands can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The loop has a connection for us."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)  # else uvloop keeps writes to a turn's end

    def data_received(self, data: bytes) -> None:
        """Gather replies; the last one that is wanted ends the exchange."""
        self._parser.feed(data)
        try:
            while (reply := self._parser.gets()) is not False:
                self._replies.append(reply)
        except hiredis.ProtocolError as error:
            self.fail(ConnectionError(f"not the protocol of Redis: {error}"))
            return
        if self._done is None:
            self.fail(ConnectionError("Redis answers what nobody asked"))
        elif len(self._replies) >= self._num_wanted:
            replies, self._replies = self._replies, []
            if any(isinstance(reply, ConnectionError) for reply in replies):
                self._hang_up()
            self._finish(replies)

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits learns that no reply comes."""
        self.fail(ConnectionError("Redis closed the connection"))

    def fail(self, error: Exception) -> None:
        """Close, and let whoever waits know why."""
        self._hang_up()
        self._finish(error)

    def _hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, result: list[Any] | Exception) -> None:
        done, self._done = self._done, None
        if self._timer is not None:
            self._timer.cancel()
        if done is not None:
            done(result)

    def start(self, commands: Sequence[Command], timeout_s: float, done: Done) -> None:
        """Send commands; `done` gets their replies, or what went wrong."""
        assert self._transport is not None
        self._done = done
        self._num_wanted = len(commands)
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._give_up)
        self._transport.write(b"".join([_pack(tuple(command)) for command in commands]))

    def _give_up(self) -> None:
        self.fail(TimeoutError("Redis did not answer in time"))

    async def exchange(self, commands: Sequence[Command], timeout_s: float) -> list[Any]:
        """`start`, awaited. Raises: ConnectionError, TimeoutError (of redis)."""
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.start(commands, timeout_s, partial(_set, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            self.fail(ConnectionError("interrupted"))  # replies under way belong to nobody
            raise


def _set(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


class RedisLink:
    """One connection of its own, opened when needed. One exchange at a time."""

    def __init__(self, redis: Redis) -> None:
        pool = redis.connection_pool
        self._options: Mapping[str, Any] = pool.connection_kwargs
        self._is_tls = issubclass(pool.connection_class, SSLConnection)
        self._timeout_s: float = self._options["socket_timeout"]
        self._wire: _Wire | None = None

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send all in one write and gather the replies; an error reply stands in its place.

        Raises: ConnectionError, TimeoutError (of redis); the connection is closed then.
        """
        wire = self._wire
        if wire is None or not wire.is_open:
            wire = self._wire = await self._connect()
        return await wire.exchange(commands, self._timeout_s)

    def start(self, commands: Sequence[Command], done: Done) -> bool:
        """`exchange` without a task: `done` gets what it would return or raise. False if not connected."""
        wire = self._wire
        if wire is None or not wire.is_open:
            return False
        wire.start(commands, self._timeout_s, done)
        return True

    async def execute(self, *command: Part) -> Any:
        """One command. Raises: RedisError."""
        [reply] = await self.exchange([command])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def close(self) -> None:
        """Hang up: an exchange under way fails, the next one connects again."""
        if self._wire is not None:
            self._wire.fail(ConnectionError("closed"))

    async def _connect(self) -> _Wire:
        timeout_s = self._options["socket_connect_timeout"]
        try:
            async with asyncio.timeout(timeout_s):
                wire = await self._open()
        except OSError as error:  # TimeoutError is one too
            raise ConnectionError(f"cannot connect to Redis: {error or 'timeout'}") from error
        greeting = self._greeting()
        if greeting:
            for reply in await wire.exchange(greeting, timeout_s):
                if isinstance(reply, Exception):
                    wire.fail(reply)
                    raise ConnectionError(f"Redis refuses the connection: {reply}")
        return wire

    async def _open(self) -> _Wire:
        loop, options = asyncio.get_running_loop(), self._options
        if "path" in options:
            _, wire = await loop.create_unix_connection(_Wire, options["path"])
        else:
            host, port = options.get("host", "localhost"), options.get("port", 6379)
            tls = self._tls_context() if self._is_tls else None
            _, wire = await loop.create_connection(_Wire, host, port, ssl=tls)
        return wire

    def _tls_context(self) -> ssl.SSLContext:
        options = self._options
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        if options.get("ssl_certfile"):
            context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
        if options.get("ssl_cert_reqs") == "none":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def _greeting(self) -> list[Command]:
        options = self._options
        greeting: list[Command] = []
        if options.get("password"):
            user = (options["username"],) if options.get("username") else ()
            greeting.append(("AUTH", *user, options["password"]))
        if options.get("db"):
            greeting.append(("SELECT", options["db"]))
        return greeting


class RedisSender:
    """Gathers the commands of many callers: those of one loop turn, or of one round trip, share a write."""

    def __init__(self, redis: Redis) -> None:
        self._link = RedisLink(redis)
        self._waiting: list[Call] = []
        self._sent: list[Call] = []
        self._is_sending = False
        self._connecting: asyncio.Task[None] | None = None

    async def execute(self, *command: Part) -> Any:
        """One command. Raises: RedisError."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((command, future))
        if not self._is_sending:
            self._is_sending = True
            loop.call_soon(self._send)
        return await future

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Part]) -> Any:
        """Run a script by its digest, or by its text where the server does not know it. Raises: RedisError."""
        try:
            return await self.execute("EVALSHA", script.sha, len(keys), *keys, *arguments)
        except NoScriptError:
            return await self.execute("EVAL", script.source, len(keys), *keys, *arguments)

    def _send(self) -> None:
        """Send what waits. What comes while it is under way goes with the next write."""
        self._sent, self._waiting = self._waiting, []
        if not self._sent:
            self._is_sending = False
            return
        commands = [command for command, _ in self._sent]
        if not self._link.start(commands, self._settle):
            self._connecting = asyncio.create_task(self._connect_and_send(commands))

    async def _connect_and_send(self, commands: Sequence[Command]) -> None:
        result: list[Any] | Exception
        try:
            result = await self._link.exchange(commands)
        except Exception as error:
            result = error
        self._settle(result)

    def _settle(self, result: list[Any] | Exception) -> None:
        replies = [result] * len(self._sent) if isinstance(result, Exception) else result
        for (_, future), reply in zip(self._sent, replies, strict=True):
            _set(future, reply)
        self._send()

    async def close(self) -> None:
        """Hang up. Commands under way fail as cancelled."""
        for _, future in (*self._sent, *self._waiting):
            future.cancel()
        self._waiting.clear()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        self._link.close()
