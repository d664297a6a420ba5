"""The files of batches: requests that tenants upload, and answers that they download.

Everything blocks and raises StoreError.
"""

import hashlib
import re
import secrets
import time
from collections.abc import Iterable, Iterator

import msgspec

from shared.packages.store import PackageStore

#: Prefix of the ids, which distinguishes these files from those of vector stores.
FILE_ID = "file-batch-"
_ID = re.compile(FILE_ID + "[0-9a-f]{32}")
_FOLDER = "files"
_TIME_DIGITS = 11


class BatchFile(msgspec.Struct, frozen=True):
    """A file. `created_at`: epoch seconds."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int


def make_id(beginning: str, now_s: float, name: str = "") -> str:
    """An id that sorts by time. It ends in a hash of `name`, or in random digits without a name."""
    tail = hashlib.sha256(name.encode()).hexdigest()[:21] if name else secrets.token_hex(11)[:21]
    return f"{beginning}{int(now_s * 1000):0{_TIME_DIGITS}x}{tail}"


def time_of(id_: str, beginning: str) -> float:
    """The epoch seconds of an id; 0 for other ids."""
    digits = id_.removeprefix(beginning)[:_TIME_DIGITS]
    try:
        return int(digits, 16) / 1000
    except ValueError:
        return 0.0


class BatchFiles:
    """The files of each owner. The record of a file is written after its bytes."""

    def __init__(self, store: PackageStore) -> None:
        self._store = store

    def put(
        self, owner: str, filename: str, purpose: str, pieces: Iterable[bytes], num_bytes: int
    ) -> BatchFile:
        now = time.time()  # noqa: TID251
        file = BatchFile(make_id(FILE_ID, now), filename, purpose, num_bytes, int(now))
        self.keep(owner, file, pieces)
        return file

    def keep(self, owner: str, file: BatchFile, pieces: Iterable[bytes]) -> None:
        """Store a file. Idempotent."""
        self._store.write(_data(owner, file), pieces)
        self._store.put_if_absent(_record(owner, file.id), msgspec.json.encode(file))

    def get(self, owner: str, id_: str) -> BatchFile | None:
        if not _ID.fullmatch(id_):
            return None
        data = self._store.get(_record(owner, id_))
        return None if data is None else msgspec.json.decode(data, type=BatchFile)

    def read(self, owner: str, file: BatchFile) -> Iterator[bytes]:
        return self._store.stream(_data(owner, file))

    def delete(self, owner: str, file: BatchFile) -> None:
        self._store.delete(_record(owner, file.id))
        self._store.delete(_data(owner, file))

    def ids(self, owner: str) -> list[str]:
        keys = (key.rpartition("/")[2] for key in self._store.list(f"{_FOLDER}/{owner}"))
        return sorted(name.removesuffix(".json") for name in keys if name.endswith(".json"))

    def usage(self, owner: str) -> tuple[int, int]:
        names = [key.rpartition(".")[2] for key in self._store.list(f"{_FOLDER}/{owner}")]
        return names.count("json"), sum(int(name) for name in names if name.isdigit())

    def sweep(self, before_s: float) -> None:
        """Delete older files, bytes without a record, and leftovers of interrupted writes."""
        self._store.delete_parts(before_s)
        for key in self._store.list(_FOLDER):
            if time_of(key.rpartition("/")[2], FILE_ID) < before_s:
                self._store.delete(key)


def _record(owner: str, id_: str) -> str:
    return f"{_FOLDER}/{owner}/{id_}.json"


def _data(owner: str, file: BatchFile) -> str:
    """The key contains the size, so that listing an owner's keys gives its usage."""
    return f"{_FOLDER}/{owner}/{file.id}.{file.num_bytes}"
