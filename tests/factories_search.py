"""Search processes, indexes and items for tests."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import numpy as np

from search.catalog import Catalog, Sqlite
from search.index import open_indexes
from search.server import SearchApp, create_server, listen
from search.stores import Stores
from shared.search import Fault, Item, Request, SearchError
from shared.settings.limits import LimitSettings
from shared.settings.tree import SearchSettings
from tests.waiting import until

T = TypeVar("T")
ROOT = Path(__file__).parents[1]


def make_vectors(count: int, dimensions: int = 8, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((count, dimensions)).astype("<f4")
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def make_items(count: int, dimensions: int = 8) -> list[Item]:
    """Returns items with a text and attributes of each type."""
    return [
        Item(
            id=f"item {number}",
            vector=row.tobytes(),
            text=f"text {number}",
            attributes={
                "number": float(number),
                "is_even": number % 2 == 0,
                "word": f"w{number % 5}",
            },
        )
        for number, row in enumerate(make_vectors(count, dimensions))
    ]


class SearchProcess:
    """`vlm search-node` on its own socket, which tests can kill and restart."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        # Paths of sockets must be short.
        self._sockets = tempfile.TemporaryDirectory(prefix="vlm-search-")
        self.url = f"unix://{self._sockets.name}/s"
        self.settings = SearchSettings(url=self.url, data_dir=str(folder))
        self._variables = {f"VLM_SEARCH__{name.upper()}": value for name, value in settings.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(
            transport=httpx.HTTPTransport(uds=f"{self._sockets.name}/s"),
            base_url="http://search",
            timeout=30,
        )

    def start(self) -> None:
        """Starts the process and waits until it answers."""
        command = [sys.executable, "-m", "vlm", "search-node", "--url", self.url]
        environment = {**os.environ, "VLM_LOGS__LEVEL": "warning", **self._variables}
        self._process = subprocess.Popen(
            [*command, "--data-dir", str(self.folder)], cwd=ROOT, env=environment
        )
        deadline = time.monotonic() + 240
        while True:
            with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
                probe.connect(self.url.removeprefix("unix://"))
                return
            assert self._process.poll() is None, "the search process ended"
            assert time.monotonic() < deadline, "the search process does not answer"
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def ask(self, request: Request, type_: type[T]) -> T:
        """Sends a request; returns the response. Raises: SearchError, httpx.HTTPError."""
        answer = self.client.post("/", content=msgspec.msgpack.encode(request))
        if answer.status_code == 422:
            raise SearchError(msgspec.msgpack.decode(answer.content, type=Fault))
        assert answer.status_code == 200, answer.status_code
        return msgspec.msgpack.decode(answer.content, type=type_)

    def stop(self) -> int:
        """Terminates the process. Returns its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(60)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()
        self.client.close()
        self._sockets.cleanup()


@contextmanager
def run_search(folder: Path, **settings: Any) -> Iterator[SearchProcess]:
    """Runs a search process."""
    process = SearchProcess(folder, **settings)
    try:
        process.start()
        yield process
    finally:
        process.close()


@asynccontextmanager
async def serve_search(folder: Path, **settings: Any) -> AsyncIterator[SearchSettings]:
    """Serves a search process's requests in this process, on a socket; yields settings for a gateway."""
    with tempfile.TemporaryDirectory(prefix="vlm-search-") as sockets:
        limits = LimitSettings(**settings.pop("limits", {}))
        search = SearchSettings(url=f"unix://{sockets}/s", data_dir=str(folder), **settings)
        folder.mkdir(exist_ok=True)
        stores = Stores(
            Catalog(Sqlite(folder / "catalog.sqlite")),
            open_indexes(f"lance://{folder}/stores"),
            limits,
            [Path(path) for path in search.collections],
        )
        app = SearchApp(stores.answer, "", 4 * limits.max_body_bytes)
        server = create_server(app)
        task = asyncio.create_task(server._serve([listen(search.url)]))
        await until(lambda: server.started)
        try:
            yield search
        finally:
            server.should_exit = True
            await task
            app.close()
            stores.close()
