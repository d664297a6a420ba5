"""Pipelined Redis connections: many commands per write, from many callers.

redis-py spends more CPU on a command than Redis does. This client combines the commands of a loop iteration into one
write, up to a maximum size, and packs and parses with hiredis. A connection fails if it makes no progress within a
command's timeout, independent of the transfer's size. Addresses and credentials come from a redis-py client.

redis-py's clients are created with explicit timeouts and without retries: by default they repeat a command whose reply
was lost, even if the command is not idempotent, and time out before a long blocking read returns.
"""

import asyncio
import logging
import random
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import wraps
from hashlib import sha1
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import hiredis
import msgspec
from redis.asyncio import Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoScriptError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from shared.process import cancel
from shared.redis.sentinel import SentinelPool, create_sentinel_redis
from shared.settings import SettingsError
from shared.settings.redis_url import SentinelUrl
from shared.settings.tree import RedisSettings

logger = logging.getLogger(__name__)


def settle(future: asyncio.Future[Any], result: Any) -> None:
    """Set the result of a future, or its exception if the result is an exception. Ignores a cancelled future."""
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


@dataclass(frozen=True, slots=True)
class Script:
    source: str
    sha: str


def load_script(*paths: Path) -> Script:
    source = "".join(path.read_text() for path in paths)
    return Script(source, sha1(source.encode(), usedforsecurity=False).hexdigest())


def named(*raw: bytes, **arguments: Any) -> tuple[bytes, ...]:
    """ARGV of a script: the named arguments as one MessagePack map, then raw bytes, which Lua could not unpack."""
    return msgspec.msgpack.encode(arguments), *raw


Part = str | bytes | int
Command = Sequence[Part]
#: Called with the replies, in order, as they arrive. If the exchange fails, the last call has the error.
OnReplies = Callable[[Sequence[Any], Exception | None], None]

REMIND_AFTER_S = 60.0  #: interval of warnings during an outage
_PAUSE_S = 1.0
#: Commands are combined into one write up to this size: commands of a larger write would delay each other, and fail
#: together.
MAX_WRITE_BYTES = 256 * 1024
#: Bytes of a write that the kernel may buffer. Their progress is invisible: they must be sent within a command's timeout.
MAX_UNSEEN_BYTES = 512 * 1024

_WITH_TTL = load_script(Path(__file__).parent / "scripts" / "with_ttl.lua")
_NOTHING = memoryview(b"")

_ERRORS: dict[str, type[Exception]] = {
    "NOSCRIPT": NoScriptError,
    "OOM": OutOfMemoryError,
    "LOADING": BusyLoadingError,  # a subclass of ConnectionError: idempotent calls are retried
    "READONLY": ConnectionError,  # this server is a replica now; a new connection finds the primary
}


#: hiredis declares a tuple of one part, but accepts any number of parts.
_pack: Callable[[tuple[Part, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]


def _pack_all(commands: Sequence[Command]) -> list[bytes]:
    return [_pack(tuple(command)) for command in commands]


def _to_error(message: str) -> Exception:
    kind, _, rest = message.partition(" ")
    if kind in _ERRORS:
        return _ERRORS[kind](message)
    return ResponseError(rest if kind == "ERR" else message)


class _Wire(asyncio.Protocol):
    """A connection with one exchange at a time. Replies have the order of the commands."""

    def __init__(self) -> None:
        self._parser = hiredis.Reader(replyError=_to_error)
        self._num_wanted = 0
        self._on_replies: OnReplies | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timeout_s = 0.0
        self._moved_at = 0.0  #: by the loop's clock: last time that bytes were sent or received
        self._unwritten = _NOTHING
        self._is_paused = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # With a limit above 1, uvloop delays writes to the end of a loop iteration. With a limit of 0, TLS would pause
        # without need.
        self._transport.set_write_buffer_limits(high=1, low=0)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_UNSEEN_BYTES)

    def data_received(self, data: bytes) -> None:
        """Deliver replies; the last expected one ends the exchange."""
        self._moved_at = self._loop.time()
        self._parser.feed(data)
        replies: list[Any] = []
        try:
            while (reply := self._parser.gets()) is not False:
                replies.append(reply)
        except hiredis.ProtocolError as error:
            self.fail(ConnectionError(f"the server does not speak Redis's protocol: {error}"))
            return
        if len(replies) > self._num_wanted:
            self.fail(ConnectionError("Redis sent a reply without a command"))
        elif replies:
            if any(isinstance(reply, ConnectionError) for reply in replies):
                self._hang_up()
            self._num_wanted -= len(replies)
            self._emit(replies)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(ConnectionError("Redis closed the connection"))

    def fail(self, error: Exception) -> None:
        """Close the connection, and fail the running exchange."""
        self._hang_up()
        self._stop_timer()
        self._num_wanted = 0
        self._emit((), error)

    def _hang_up(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _emit(self, replies: Sequence[Any], failure: Exception | None = None) -> None:
        on_replies = self._on_replies
        if self._num_wanted == 0:
            self._on_replies = None
            self._unwritten = _NOTHING
        if on_replies is not None:
            on_replies(replies, failure)

    def start(self, packed: Sequence[bytes], timeout_s: float, on_replies: OnReplies) -> None:
        """Send commands; `on_replies` is called with their replies, or with an error."""
        self._on_replies = on_replies
        self._num_wanted = len(packed)
        self._moved_at = self._loop.time()
        if timeout_s != self._timeout_s:
            self._stop_timer()
            self._timeout_s = timeout_s
        if self._timer is None:  # otherwise the timer of an earlier exchange checks this one too
            self._timer = self._loop.call_later(timeout_s, self._check_progress)
        whole = b"".join(packed) if len(packed) > 1 else packed[0]
        if len(whole) <= MAX_WRITE_BYTES and not self._is_paused:
            assert self._transport is not None
            self._transport.write(whole)
            return
        self._unwritten = memoryview(whole)
        self._write()

    def _write(self) -> None:
        """Write as much as the kernel accepts, in chunks: each accepted chunk is progress."""
        assert self._transport is not None
        while self._unwritten and not self._is_paused:
            piece = self._unwritten[:MAX_WRITE_BYTES]
            self._unwritten = self._unwritten[MAX_WRITE_BYTES:]
            self._transport.write(piece)

    def pause_writing(self) -> None:
        """Stop writing: the kernel's buffer is full."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """Continue writing: the kernel's buffer is empty."""
        self._is_paused = False
        self._moved_at = self._loop.time()
        self._write()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_progress(self) -> None:
        """Fail if there was no progress; otherwise check again when the timeout could have passed."""
        self._timer = None
        if self._num_wanted == 0:
            return
        left_s = self._moved_at + self._timeout_s - self._loop.time()
        if left_s > 1e-3:
            self._timer = self._loop.call_later(left_s, self._check_progress)
        else:
            self.fail(TimeoutError("Redis did not answer in time"))

    async def exchange(self, packed: Sequence[bytes], timeout_s: float) -> list[Any]:
        """Send commands and wait for the replies. Raises: ConnectionError, TimeoutError (of redis)."""
        answer: asyncio.Future[list[Any]] = self._loop.create_future()
        gathered: list[Any] = []

        def on_replies(replies: Sequence[Any], failure: Exception | None) -> None:
            gathered.extend(replies)
            if failure is not None or len(gathered) == len(packed):
                settle(answer, failure or gathered)

        self.start(packed, timeout_s, on_replies)
        try:
            return await answer
        except asyncio.CancelledError:
            self.fail(ConnectionError("interrupted"))  # pending replies have no reader
            raise


def with_ttl(key: str, ttl_ms: int, *command: Part) -> Command:
    """A script that runs a command, and sets the time to live of the key that it may create: both happen, or neither."""
    return ("EVAL", _WITH_TTL.source, 1, key, ttl_ms, *command)


class RedisLink:
    """One connection, opened on demand. One exchange at a time."""

    def __init__(self, redis: Redis) -> None:
        self._pool = pool = redis.connection_pool
        self._options: Mapping[str, Any] = pool.connection_kwargs
        self._is_tls = issubclass(pool.connection_class, SSLConnection)
        self.timeout_s: float = self._options["socket_timeout"]  #: longest time without progress
        self._wire: _Wire | None = None

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one write and return the replies; an error reply is returned in its place.

        Raises: ConnectionError, TimeoutError (of redis). Both close the connection.
        """
        wire = await self.connect()
        return await wire.exchange(_pack_all(commands), self.timeout_s)

    def start(self, packed: Sequence[bytes], on_replies: OnReplies) -> bool:
        """Send packed commands without a task; `on_replies` is called with the result. Returns False if not connected."""
        wire = self._wire
        if wire is None or not wire.is_open:
            return False
        wire.start(packed, self.timeout_s, on_replies)
        return True

    async def execute(self, *command: Part) -> Any:
        [reply] = await self.exchange([command])
        if isinstance(reply, Exception):
            raise reply
        return reply

    def close(self) -> None:
        """Close the connection. A running exchange fails, and the next exchange connects again."""
        if self._wire is not None:
            self._wire.fail(ConnectionError("closed"))

    async def connect(self) -> _Wire:
        """The open connection, or a new one. Raises: ConnectionError, TimeoutError (of redis)."""
        if self._wire is None or not self._wire.is_open:
            self._wire = await self._connect()
        return self._wire

    async def _connect(self) -> _Wire:
        timeout_s = self._options["socket_connect_timeout"]
        try:
            async with asyncio.timeout(timeout_s):
                wire = await self._open()
        except OSError as error:  # includes TimeoutError
            raise ConnectionError(f"cannot connect to Redis: {error or 'timeout'}") from error
        greeting = self._greeting()
        if greeting:
            for reply in await wire.exchange(_pack_all(greeting), timeout_s):
                if isinstance(reply, Exception):
                    wire.fail(reply)
                    raise ConnectionError(f"Redis refuses the connection: {reply}")
        return wire

    async def _open(self) -> _Wire:
        loop, options = asyncio.get_running_loop(), self._options
        if "path" in options:
            _, wire = await loop.create_unix_connection(_Wire, options["path"])
        else:
            if isinstance(self._pool, SentinelPool):
                host, port = await self._pool.find_primary(self)
            else:
                host, port = options.get("host", "localhost"), options.get("port", 6379)
            tls = None
            if self._is_tls:
                given = {name: v for name, v in options.items() if name.startswith("ssl_")}
                tls = SSLConnection(**given).ssl_context.get()
            _, wire = await loop.create_connection(_Wire, host, port, ssl=tls)
        return wire

    def _greeting(self) -> list[Command]:
        options = self._options
        greeting: list[Command] = []
        if options.get("password"):
            user = (options["username"],) if options.get("username") else ()
            greeting.append(("AUTH", *user, options["password"]))
        if options.get("db"):
            greeting.append(("SELECT", options["db"]))
        return greeting


class _Call(NamedTuple):
    """A command, its waiting caller, and the time of the call (by the loop's clock)."""

    command: Command
    future: asyncio.Future[Any]
    since: float


class RedisSender:
    """Combines the commands of many callers: all commands of one loop iteration, or of one round trip, are one write.

    If the last write was one command, the next command is sent immediately, because it is likely to be alone too. A
    command is dropped if its caller is cancelled before it is sent.
    """

    def __init__(self, redis: Redis) -> None:
        self._link = RedisLink(redis)
        self._waiting: deque[_Call] = deque()
        self._sent: deque[_Call] = deque()
        self._is_sending = False
        self._was_alone = False  # the last write was one command
        self._connecting: asyncio.Task[None] | None = None

    async def execute(self, *command: Part) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting.append(_Call(command, future, loop.time()))
        if not self._is_sending:
            self._is_sending = True
            if self._was_alone:
                self._send()
            else:
                loop.call_soon(self._send)
        return await future

    async def execute_soon(self, *command: Part) -> Any:
        """Send a command in one write with the commands of other tasks in this loop iteration. Raises: RedisError."""
        self._was_alone = False
        return await self.execute(*command)

    async def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Part]) -> Any:
        """Run a script by its digest, or by its text if the server does not have it. Raises: RedisError."""
        try:
            return await self.execute("EVALSHA", script.sha, len(keys), *keys, *arguments)
        except NoScriptError:
            return await self.execute("EVAL", script.source, len(keys), *keys, *arguments)

    def _send(self) -> None:
        """Send waiting commands up to the size of a write. A later call sends the other commands."""
        packed = self._pack_next()
        if not packed:
            self._is_sending = False
        elif not self._link.start(packed, self._on_replies):
            self._connecting = asyncio.create_task(self._connect_and_send(packed))

    def _pack_next(self) -> list[bytes]:
        packed: list[bytes] = []
        num_bytes = 0
        while self._waiting and num_bytes < MAX_WRITE_BYTES:
            call = self._waiting.popleft()
            if not call.future.done():
                packed.append(_pack(tuple(call.command)))
                num_bytes += len(packed[-1])
                self._sent.append(call)
        if packed:
            self._was_alone = len(packed) == 1
        return packed

    async def _connect_and_send(self, packed: Sequence[bytes]) -> None:
        try:
            await self._link.connect()
        except Exception as error:  # all waiting calls would fail in the same way
            self._fail([*self._sent, *self._waiting], error)
            self._waiting.clear()
            self._sent.clear()
            self._send()
            return
        if not self._link.start(packed, self._on_replies):
            self._on_replies((), ConnectionError("Redis closed the connection"))

    def _on_replies(self, replies: Sequence[Any], failure: Exception | None) -> None:
        for reply in replies:
            settle(self._sent.popleft().future, reply)
        if failure is not None:
            self._fail(self._sent, failure)
            self._sent.clear()
            if isinstance(failure, TimeoutError):  # older waiting calls have timed out too
                before = asyncio.get_running_loop().time() - self._link.timeout_s
                while self._waiting and self._waiting[0].since <= before:
                    settle(self._waiting.popleft().future, failure)
        if not self._sent:
            self._send()

    def _fail(self, calls: Iterable[_Call], error: Exception) -> None:
        for call in calls:
            settle(call.future, error)

    async def close(self) -> None:
        """Close the connection, and cancel the running commands."""
        for call in (*self._sent, *self._waiting):
            call.future.cancel()
        self._waiting.clear()
        await cancel(self._connecting)
        self._link.close()


#: Timeout of a blocking read on the server. The timeout of the socket is longer.
BLOCK_S = 2.0

Result = TypeVar("Result")
Class = TypeVar("Class", bound=type)
Function = TypeVar("Function", bound=Callable[..., Coroutine[Any, Any, Any]])

#: Errors after which an idempotent command can be repeated.
TRANSIENT = (ConnectionError, TimeoutError)


def create_redis(settings: RedisSettings, *, blocking: bool = False) -> Redis:
    """Create a client of the first shard, without retries. `blocking`: increase its timeout by `BLOCK_S`.

    Raises: SettingsError for an unknown option in the URL.
    """
    url = settings.first.url
    options: dict[str, Any] = {
        "socket_timeout": settings.command_timeout_s + (BLOCK_S if blocking else 0.0),
        "socket_connect_timeout": settings.connect_timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
        "protocol": 2,
    }
    if not url.startswith("unix:"):
        options["socket_keepalive"] = True
    if sentinels := SentinelUrl.parse(url):
        redis = create_sentinel_redis(sentinels, options)
    else:
        redis = Redis.from_url(url, **options)
    try:
        redis.connection_pool.make_connection()
    except TypeError as error:
        name = str(error).rpartition(" ")[2]
        raise SettingsError(f"VLM_REDIS_URL: the URL has an unknown option {name}") from None
    return redis


async def retry_idempotent(call: Callable[[], Awaitable[Result]]) -> Result:
    """Retry an idempotent call twice. Raises: RedisError of the last try."""
    for longest_pause_s in (0.02, 0.04):
        try:
            return await call()
        except TRANSIENT:
            await asyncio.sleep(random.random() * longest_pause_s)
    return await call()


def redis_errors_as(kind: Callable[[str], Exception]) -> Callable[[Class], Class]:
    """Decorate a class: its public coroutine methods raise `kind` instead of RedisError."""

    def translated(method: Function) -> Function:
        @wraps(method)
        async def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return await method(*args, **kwargs)
            except RedisError as error:
                raise kind(str(error)) from error

        return cast("Function", call)

    def decorate(cls: Class) -> Class:
        for name, method in list(vars(cls).items()):
            if iscoroutinefunction(method) and not name.startswith("_"):
                setattr(cls, name, translated(method))
        return cls

    return decorate


class OutageLog:
    """Logs the retries of one loop, so that an outage is one line instead of one per retry."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._logged_at: float | None = None

    def failed(self, error: Exception) -> None:
        now = time.monotonic()
        if self._logged_at is None or now - self._logged_at >= REMIND_AFTER_S:
            self._logged_at = now
            cause = str(error).rstrip(".") or type(error).__name__
            if isinstance(error.__cause__ or error, AuthenticationError):  # redis-py wraps it
                text = "Redis at %s refuses user or password (%s); correct VLM_REDIS_URL"
            else:
                text = "cannot reach Redis at %s (%s); start Redis there, or set VLM_REDIS_URL"
            logger.warning(text + "; retrying", self._address, cause)

    def succeeded(self) -> None:
        if self._logged_at is not None:
            self._logged_at = None
            logger.warning("Redis at %s answers again", self._address)


async def wait_for_redis(settings: RedisSettings) -> None:
    """Wait until Redis answers, even with an error."""
    log = OutageLog(settings.address)
    async with aclosing(create_redis(settings)) as redis:
        while True:
            try:
                with suppress(ResponseError):
                    await redis.time()
                break
            except (*TRANSIENT, OSError) as error:
                log.failed(error)
                await asyncio.sleep(_PAUSE_S)
    log.succeeded()
