"""An index in a process of its own, to be killed: forked from one that has imported what it needs."""

import multiprocessing
import os
import signal
import warnings
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from search.collection import FlatIndex, Manifest, write_manifest, write_part, write_whole
from search.index import VectorIndex, matches
from search.lance import LanceIndexes
from search.postgres import open_postgres
from shared.search import Filter, Hit, Item
from tests.search.postgres_server import postgres

KINDS = ("flat", "lance", "postgres")
DIMENSIONS = 4


class Rewritten:
    """A flat collection as one would change it: written anew beside the old one, then named."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        if not (directory / "current").exists():
            self._write({})
        self._open()

    def _open(self) -> None:
        self.index = FlatIndex(self.directory / (self.directory / "current").read_text())

    def _write(self, items: dict[str, Item]) -> None:
        folder = next(
            path for path in (self.directory / str(n) for n in count()) if not path.exists()
        )
        folder.mkdir()
        parts = [write_part(folder, 0, list(items.values()))] if items else []
        write_manifest(
            folder,
            Manifest(
                model="m",
                digest="d",
                dimensions=DIMENSIONS,
                dtype="f32",
                num_items=len(items),
                parts=tuple(parts),
            ),
        )
        write_whole(self.directory / "current", folder.name.encode())

    def upsert(self, items: Sequence[Item]) -> None:
        kept = {item.id: item for item in self.index.items()}
        self._write(kept | {item.id: item for item in items})
        self._open()

    def delete(self, ids: Sequence[str] | None = None, where: Filter | None = None) -> int:
        kept = {item.id: item for item in self.index.items()}
        gone = [
            key
            for key, item in kept.items()
            if (key in ids if ids is not None else where and matches(where, item.attributes))
        ]
        for key in gone:
            del kept[key]
        self._write(kept)
        self._open()
        return len(gone)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.index, name)


def prepare(kind: str, directory: Path) -> None:
    """Make what `open_index` finds there."""
    if kind == "postgres":
        directory.mkdir()
        (directory / "url").write_text(postgres().new_database())


def open_index(kind: str, directory: Path) -> VectorIndex:
    if kind == "flat":
        return Rewritten(directory)  # type: ignore[return-value]
    if kind == "lance":
        return LanceIndexes(directory).open("store", DIMENSIONS)
    indexes = open_postgres((directory / "url").read_text())
    with indexes.database.change():
        index = indexes.open("store", DIMENSIONS)
    index.close = indexes.close  # type: ignore[method-assign]
    return index


class _Asked(msgspec.Struct):
    name: str
    items: list[Item] = []
    ids: list[str] | None = None
    where: Filter | None = None
    vectors: bytes = b""
    k: int = 0
    after: str = ""


def serve(kind: str, directory: str, pipe: Connection) -> None:
    """Do what is asked, until the pipe is closed."""
    warnings.simplefilter("ignore")
    index = open_index(kind, Path(directory))
    pipe.send_bytes(b"ready")
    with suppress(EOFError):
        while True:
            asked = msgspec.msgpack.decode(pipe.recv_bytes(), type=_Asked)
            pipe.send_bytes(msgspec.msgpack.encode(_do(index, asked)))


def _do(index: VectorIndex, asked: _Asked) -> Any:
    match asked.name:
        case "upsert":
            return index.upsert(asked.items)
        case "delete":
            return index.delete(asked.ids, asked.where)
        case "search":
            vectors = np.frombuffer(asked.vectors, "<f4").reshape(-1, DIMENSIONS)
            return index.search(vectors, asked.k, asked.where)
        case "get":
            return index.get(asked.ids or [])
        case "page":
            return index.page(asked.after, asked.k, with_vectors=True)
        case "count":
            return index.stats().num_items
        case "compact":
            return index.compact()
    raise AssertionError(asked.name)


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


class IndexProcess:
    """The parent's end."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind, self.directory = kind, directory
        prepare(kind, directory)
        self.start()

    def start(self) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(
            target=serve, args=(self.kind, str(self.directory), theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        assert self.pipe.poll(60), "the index does not open"
        assert self.pipe.recv_bytes() == b"ready"

    def begin(self, name: str, **asked: Any) -> None:
        self.pipe.send_bytes(msgspec.msgpack.encode(_Asked(name, **asked)))

    def ask(self, name: str, type_: Any = Any, **asked: Any) -> Any:
        self.begin(name, **asked)
        return msgspec.msgpack.decode(self.pipe.recv_bytes(), type=type_)

    def search(self, vectors: np.ndarray, k: int, where: Filter | None = None) -> list[list[Hit]]:
        data = np.ascontiguousarray(vectors, "<f4").tobytes()
        return self.ask("search", list[list[Hit]], vectors=data, k=k, where=where)

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.pipe.close()
        self.process.join(20)
        assert not self.process.is_alive()
