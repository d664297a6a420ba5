"""An index in its own process, which tests kill. It is forked from a process that has the imports."""

import multiprocessing
import os
import signal
import warnings
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from search.index import VectorIndex
from search.postgres import open_postgres
from tests.search.postgres_server import postgres

KINDS = ("lance", "postgres") if find_spec("pgserver") else ("lance",)
DIMENSIONS = 4
#: Imports LanceDB, which takes seconds, so only the process that runs these tests does.
lance = partial(import_module, "search.lance")


def open_index(kind: str, place: str) -> VectorIndex:
    if kind == "lance":
        return lance().LanceIndexes(Path(place)).open("store", DIMENSIONS)
    indexes = open_postgres(place)
    with indexes.database.change():
        return indexes.open("store", DIMENSIONS)


def serve(kind: str, place: str, pipe: Connection) -> None:
    """Runs the requested methods until the pipe is closed."""
    warnings.simplefilter("ignore")
    index = open_index(kind, place)
    pipe.send("ready")
    with suppress(EOFError):
        while True:
            name, arguments = pipe.recv()
            pipe.send(getattr(index, name)(**arguments))


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__, "search.lance"])


class IndexProcess:
    """The parent's side."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.place = postgres().new_database() if kind == "postgres" else str(directory)
        self.start()

    def start(self) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(
            target=serve, args=(self.kind, self.place, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        assert self.pipe.poll(60), "the index does not open"
        assert self.pipe.recv() == "ready"

    def begin(self, name: str, **arguments: Any) -> None:
        self.pipe.send((name, arguments))

    def ask(self, name: str, **arguments: Any) -> Any:
        self.begin(name, **arguments)
        return self.pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.pipe.close()
        self.process.join(20)
        assert not self.process.is_alive()


def recall(
    index: VectorIndex, vectors: np.ndarray, queries: np.ndarray, names: np.ndarray | None = None
) -> float:
    """Returns the share of the ten nearest vectors that a search finds. `names`: IDs, by default numbers."""
    names = np.arange(len(vectors)) if names is None else names
    nearest = np.argsort(-(queries @ vectors.T), axis=1)[:, :10]
    shares = [
        len({hit.item.id for hit in hits} & {str(n) for n in names[row]})
        for hits, row in zip(index.search(queries, 10), nearest, strict=True)
    ]
    return sum(shares) / len(shares) / 10
