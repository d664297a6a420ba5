"""The search process: serves gateways over HTTP.

Without PostgreSQL, a lock on the data directory prevents a second process. Acknowledged writes survive a `kill -9`.
"""

import asyncio
import errno
import hmac
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import IO
from urllib.parse import urlsplit

import msgspec
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import shared.search as wire
from search.catalog import Catalog, Sqlite
from search.collection import BadCollection
from search.index import open_indexes
from search.stores import Stores
from shared.process import lock_directory, resolve_structs
from shared.search import SearchError, refuse
from shared.settings import SettingsError, is_loopback, own_folder
from shared.settings.tree import SearchSettings, Settings

#: Number of reader threads, and of writer threads. Writers of one store wait for each other.
NUM_THREADS = 4
MAX_WAITING = 256
DRAIN_S = 10
_CATALOG = "catalog.sqlite"

logger = logging.getLogger(__name__)


class SearchApp:
    """An ASGI application: `POST /` handles a request, `GET /healthz` is the liveness probe."""

    def __init__(
        self, answer: Callable[[wire.Request], object], token: str, max_bytes: int
    ) -> None:
        self._answer = answer
        self._authorization = f"Bearer {token}".encode() if token else b""
        self._max_bytes = max_bytes
        self._readers = ThreadPoolExecutor(NUM_THREADS, "read")
        self._writers = ThreadPoolExecutor(NUM_THREADS, "write")
        self._decoder = msgspec.msgpack.Decoder(wire.AnyRequest)
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 200 with the result, 422 with a fault, or another status without a body."""
        request = Request(scope, receive)
        shown = request.headers.get("authorization", "").encode("latin-1")
        if scope["path"] == "/healthz":
            answer = Response()
        elif self._authorization and not hmac.compare_digest(shown, self._authorization):
            answer = Response(status_code=401)
        else:
            self._num_open += 1
            try:
                answer = Response(*await self._serve(request))
            except ClientDisconnect:
                logger.info("a gateway disconnected in the middle of a request")
                return
            finally:
                self._num_open -= 1
        await answer(scope, receive, send)

    async def _serve(self, request: Request) -> tuple[bytes, int]:
        """Handle a request. Returns body and status. Raises: ClientDisconnect."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_bytes:
                return _fault("too_large", f"The request exceeds {self._max_bytes} bytes.")
        if self._num_open > MAX_WAITING:
            return _fault("unavailable", "The search process is overloaded; retry.")
        try:
            asked = self._decoder.decode(body)
        except msgspec.MsgspecError:
            logger.exception("a request cannot be read")
            return _fault("unavailable", "The versions of gateway and search differ: update both.")
        del body
        loop = asyncio.get_running_loop()
        try:
            threads = self._readers if isinstance(asked, wire.Read) else self._writers
            answer = await loop.run_in_executor(threads, self._answer, asked)
        except SearchError as error:
            return msgspec.msgpack.encode(error.fault), 422
        except Exception:
            logger.exception("%s failed", type(asked).__name__)
            return b"", 500
        return msgspec.msgpack.encode(answer), 200

    def close(self) -> None:
        self._readers.shutdown()
        self._writers.shutdown()


def _fault(code: str, message: str) -> tuple[bytes, int]:
    return msgspec.msgpack.encode(refuse(code, message).fault), 422


def data_directory(settings: SearchSettings) -> Path:
    if settings.data_dir:
        return Path(settings.data_dir).expanduser().absolute()
    return own_folder("state") / "search"


def run_search(settings: Settings) -> None:
    """Serve until a signal. Raises: SettingsError."""
    search = settings.search
    if not search.url:
        raise SettingsError(
            "VLM_SEARCH__URL: set the address to listen on: unix:///PATH or http://HOST:PORT"
        )
    host = urlsplit(search.url).hostname
    if host is not None and not is_loopback(host) and not search.token.get_secret_value():
        raise SettingsError(
            "VLM_SEARCH__TOKEN: required on an address that other machines can reach; set the same secret "
            "at the gateways"
        )
    resolve_structs()
    directory = data_directory(search)
    is_shared = urlsplit(search.index).scheme == "postgresql"
    with nullcontext() if is_shared else _lock(directory):
        _serve(settings, directory)


def _serve(settings: Settings, directory: Path) -> None:
    search = settings.search
    indexes = open_indexes(search.index or f"lance://{directory / 'stores'}")
    try:
        stores = Stores(
            Catalog(indexes.database or Sqlite(directory / _CATALOG)),
            indexes,
            settings.limits,
            [Path(path).expanduser() for path in search.collections],
        )
    except BadCollection as error:
        raise SettingsError(f"VLM_SEARCH__COLLECTIONS: {error}") from None
    app = SearchApp(
        stores.answer, search.token.get_secret_value(), 4 * settings.limits.max_body_bytes
    )
    try:
        create_server(app).run(sockets=[listen(search.url)])
    finally:
        app.close()
        stores.close()


def _lock(directory: Path) -> IO[bytes]:
    try:
        return lock_directory(directory)
    except BlockingIOError:
        raise SettingsError(
            f"VLM_SEARCH__DATA_DIR: another search process uses {directory}: stop it, or set another directory"
        ) from None
    except OSError as error:
        raise SettingsError(
            f"VLM_SEARCH__DATA_DIR: {directory} cannot be written ({error.strerror})"
        ) from None


class _Server(uvicorn.Server):
    """A server that exits normally on a signal, which uvicorn would raise again."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def create_server(app: SearchApp) -> uvicorn.Server:
    """The server, to be run on the socket of `listen`."""
    config = uvicorn.Config(
        app, lifespan="off", ws="none", log_config=None, log_level="warning", access_log=False,
        timeout_graceful_shutdown=DRAIN_S, timeout_keep_alive=60,
    )  # fmt: skip
    return _Server(config)


def listen(url: str) -> socket.socket:
    """Listen at a URL; a unix socket is accessible to user and group. Raises: SettingsError."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "unix":
            return _listen_on_path(Path(parts.path))
        host = parts.hostname or ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, parts.port or 0), family=family)
    except OSError as error:
        raise SettingsError(
            f"VLM_SEARCH__URL: cannot listen at {url} ({error.strerror}): set another address"
        ) from None


def _listen_on_path(path: Path) -> socket.socket:
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise OSError(errno.EADDRINUSE, "another process listens there")
        path.unlink()  # left by a killed process
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
