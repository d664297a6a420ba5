"""The search process: answers gateways over HTTP on a socket of its own.

One per fleet: a lock on the data directory keeps a second one away. It may be killed at any time:
what it has acknowledged is on disk.
"""

import asyncio
import fcntl
import hmac
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import msgspec
import uvicorn
from starlette.types import Receive, Scope, Send

from search.catalog import Catalog
from search.collection import BadCollection
from search.index import IndexKind, SearchUnavailable, open_indexes, require
from search.stores import Stores
from shared.search import (
    AnyRequest,
    Fault,
    ListFiles,
    ListStoreFiles,
    ListStores,
    Query,
    ReadFile,
    ReadFileBatch,
    ReadItems,
    ReadStore,
    ReadStoreFile,
    Request,
    SearchError,
)
from shared.settings import SettingsError
from shared.settings.tree import SearchSettings, Settings

#: Of those that read, and of those that write: writers of one store wait for each other.
NUM_THREADS = 4
MAX_WAITING = 256
DRAIN_S = 10
_CATALOG = "catalog.sqlite"
#: What waits for no writer.
READS = (
    ReadStore, ListStores, ReadItems, Query, ReadFile, ListFiles, ReadStoreFile, ListStoreFiles,
    ReadFileBatch,
)  # fmt: skip

logger = logging.getLogger(__name__)


class SearchApp:
    """An ASGI application: `POST /` is a request, `GET /healthz` says that it lives."""

    def __init__(self, answer: Callable[[Request], object], token: str, max_bytes: int) -> None:
        self._answer = answer
        self._authorization = f"Bearer {token}".encode() if token else b""
        self._max_bytes = max_bytes
        self._readers = ThreadPoolExecutor(NUM_THREADS, "read")
        self._writers = ThreadPoolExecutor(NUM_THREADS, "write")
        self._decoder = msgspec.msgpack.Decoder(AnyRequest)
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 200 with what was asked for, 422 with a fault, or no body at all."""
        if scope["type"] != "http":
            return
        if scope["path"] == "/healthz":
            await _send(send, 200, b"")
            return
        headers = dict(scope["headers"])
        shown = headers.get(b"authorization", b"")
        if self._authorization and not hmac.compare_digest(shown, self._authorization):
            await _send(send, 401, b"")
            return
        self._num_open += 1
        try:
            answer = await self._serve(receive)
        finally:
            self._num_open -= 1
        if answer is not None:
            await _send(send, *answer)

    async def _serve(self, receive: Receive) -> tuple[int, bytes] | None:
        """Status and body; None where the gateway has left before all of its request was here."""
        body = bytearray()
        has_more = True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                logger.info("a gateway left in the middle of a request")
                return None
            body += message.get("body", b"")
            has_more = message.get("more_body", False)
            if len(body) > self._max_bytes:
                return 422, _fault("too_large", "The request is too large.")
        if self._num_open > MAX_WAITING:
            return 422, _fault("unavailable", "The search process is overloaded; retry.")
        try:
            request = self._decoder.decode(body)
        except msgspec.MsgspecError:
            logger.exception("a request cannot be read")
            return 422, _fault("unavailable", "Gateway and search process are of other versions.")
        del body
        loop = asyncio.get_running_loop()
        try:
            threads = self._readers if isinstance(request, READS) else self._writers
            answer = await loop.run_in_executor(threads, self._answer, request)
        except SearchError as error:
            return 422, msgspec.msgpack.encode(error.fault)
        except Exception:
            logger.exception("%s failed", type(request).__name__)
            return 500, b""
        return 200, msgspec.msgpack.encode(answer)

    def close(self) -> None:
        """Wait for what is under way."""
        self._readers.shutdown()
        self._writers.shutdown()


async def _send(send: Send, status: int, content: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _fault(code: str, message: str) -> bytes:
    return msgspec.msgpack.encode(msgspec.convert({"code": code, "message": message}, Fault))


def data_directory(settings: SearchSettings) -> Path:
    """Where the process keeps its files."""
    if settings.data_dir:
        return Path(settings.data_dir).expanduser().absolute()
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "vlm-fleet" / "search"


def run_search(settings: Settings) -> int:
    """Serve until a signal. Returns the exit code. Raises: SettingsError."""
    search = settings.search
    _check(search)
    directory = data_directory(search)
    lock = _lock(directory)
    try:
        stores = Stores(
            Catalog(directory / _CATALOG),
            _open_indexes(search, directory),
            settings.limits,
            [Path(path).expanduser() for path in search.collections],
        )
    except BadCollection as error:
        raise SettingsError(f"VLM_SEARCH__COLLECTIONS: {error}") from None
    app = SearchApp(
        stores.answer, search.token.get_secret_value(), 4 * settings.limits.max_body_bytes
    )
    for name in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        create_server(app).run(sockets=[listen(search.url)])
    finally:
        app.close()
        stores.close()
        lock.close()
    return 0


def _open_indexes(search: SearchSettings, directory: Path) -> IndexKind | None:
    """None where collections can do without. Raises: SearchUnavailable."""
    try:
        return open_indexes(search.index or f"lance://{directory / 'stores'}")
    except SearchUnavailable as error:
        if not search.collections or search.index:
            raise
        logger.warning("collections alone are served: %s", error)
        return None


def _check(search: SearchSettings) -> None:
    if not search.url:
        raise SettingsError(
            "VLM_SEARCH__URL: say where to listen: unix:///PATH or http://HOST:PORT"
        )
    host = urlsplit(search.url).hostname
    if host not in (None, "localhost", "127.0.0.1", "::1") and not search.token.get_secret_value():
        raise SettingsError(
            "VLM_SEARCH__TOKEN: this address can be reached from other machines: set a secret here "
            "and at the gateways"
        )
    require("numpy", "the search process")
    require("safetensors", "the search process")


def _lock(directory: Path) -> IO[bytes]:
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (directory / "lock").open("wb")
    except OSError as error:
        raise SettingsError(
            f"VLM_SEARCH__DATA_DIR: {directory} cannot be written ({error.strerror})"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise SettingsError(
            f"VLM_SEARCH__DATA_DIR: another search process uses {directory}: stop it, or name another"
        ) from None
    return lock


class _Server(uvicorn.Server):
    """Ends as any process that was asked to: uvicorn would raise the signal again."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals that end a process."""
        handlers = {
            number: signal.signal(number, self.handle_exit)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def create_server(app: SearchApp) -> uvicorn.Server:
    """A server, to be given what `listen` returns."""
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False,
        timeout_graceful_shutdown=DRAIN_S, timeout_keep_alive=60,
    )  # fmt: skip
    return _Server(config)


def listen(url: str) -> socket.socket:
    """A socket at a URL; a unix socket is for this user and group alone. Raises: SettingsError."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "unix":
            return _listen_on_path(Path(parts.path))
        host = parts.hostname or ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, parts.port or 0), family=family)
    except OSError as error:
        raise SettingsError(
            f"VLM_SEARCH__URL: cannot listen at {url} ({error.strerror}): name another place"
        ) from None


def _listen_on_path(path: Path) -> socket.socket:
    if path.is_socket():  # of one that was killed: the lock is ours
        path.unlink()
    listener = socket.socket(socket.AF_UNIX)
    others = os.umask(0o117)
    try:
        listener.bind(str(path))
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(others)
    return listener
