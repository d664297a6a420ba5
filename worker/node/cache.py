"""The package cache of a node.

`blobs/` has files by their hash, `packages/` folders of hard links to them, and `environments/` the Python packages
of applications. A process locks the folders that it uses. When the cache is full, the least recently used unlocked
folders are removed. Nodes may share a cache.
"""

import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from shared.packages.manifest import digest_of_file
from shared.packages.store import SUFFIX
from shared.settings import own_folder
from shared.settings.tree import DeploySettings

#: Disk space that the cache leaves free.
RESERVE_BYTES = 256 * 1024 * 1024
_LOCK = ".lock"


class Uses:
    """The folders that one instance uses, until `close`."""

    def __init__(self) -> None:
        self._files: list[int] = []
        self.is_over = False  #: whether the instance was stopped, which ends its downloads

    def add(self, folder: Path) -> None:
        """Lock a folder, which need not exist yet, against removal; waits for a running removal. Raises: OSError."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._files.append(_lock(_lock_of(folder), fcntl.LOCK_SH))

    def close(self) -> None:
        """Unlock the folders, and set their time of last use."""
        while self._files:
            file = self._files.pop()
            with suppress(OSError):
                os.utime(file)
            os.close(file)


class Cache:
    """A directory of at most `max_bytes` (0: limited by the disk), or more if all of it is in use."""

    def __init__(self, folder: Path, max_bytes: int = 0) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self._discarding = Lock()
        self._verified: dict[tuple[int, ...], str] = {}  # digests by `_identity`

    def has_content(self, path: Path, digest: str) -> bool:
        """Whether a regular file has this digest. Hashes it again only if it was changed or linked. Raises: OSError."""
        try:
            identity = _identity(path)
            if identity is None:
                return False
            if identity not in self._verified:
                self._verified[identity] = digest_of_file(path)
        except FileNotFoundError:
            return False
        return self._verified[identity] == digest

    def discard(self, folder: Path, is_intact: Callable[[], bool]) -> bool:
        """Remove a damaged folder, even if it is in use. Returns False if it is intact by now. Raises: OSError."""
        with self._discarding:  # else a thread could discard what another has just installed
            if not folder.is_dir() or is_intact():
                return False
            _delete(folder)
        return True

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Prevents removals within the block. Raises: OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked(self.folder / _LOCK, fcntl.LOCK_SH):
            yield

    def make_room(self, num_bytes: int, wanted: Collection[str] = ()) -> None:
        """Remove unused packages until `num_bytes` more fit, or none is left.

        Keeps the blobs of the digests in `wanted`. Does nothing while a download fills the cache; a later call makes
        room. Raises: OSError.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        names = {each.removeprefix("sha256:") for each in wanted}
        lock = _locked(self.folder / _LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(BlockingIOError), lock:
            if self._has_room(num_bytes):
                return
            self._remove_leftovers(names)
            for folder in sorted(self._folders(), key=_used_at):
                if self._has_room(num_bytes):
                    return
                if _remove(folder):
                    self._remove_leftovers(names)

    def _has_room(self, num_bytes: int) -> bool:
        if num_bytes + RESERVE_BYTES > shutil.disk_usage(self.folder).free:
            return False
        return not self._max_bytes or self._num_bytes() + num_bytes <= self._max_bytes

    def _num_bytes(self) -> int:
        roots = (self.folder / "blobs", self.folder / "environments")
        return sum(path.lstat().st_size for root in roots for path in root.rglob("*"))

    def _folders(self) -> Iterator[Path]:
        for kind in ("packages", "environments"):
            for path in (self.folder / kind).glob("*"):
                if path.is_dir() and path.suffix != SUFFIX:
                    yield path

    def _remove_leftovers(self, wanted: Collection[str]) -> None:
        """Remove unfinished files, and blobs of no package. The caller excludes running downloads."""
        for path in (self.folder / "blobs").glob("*"):
            if path.stat().st_nlink == 1 and path.name.removesuffix(SUFFIX) not in wanted:
                path.unlink()
        for kind in ("packages", "environments"):
            for path in (self.folder / kind).glob(f"*{SUFFIX}"):
                shutil.rmtree(path)


def _identity(path: Path) -> tuple[int, ...] | None:
    """A key that every change of the file changes: not even its owner can set the ctime. None: not a regular file."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _remove(folder: Path) -> bool:
    path = _lock_of(folder)
    with suppress(BlockingIOError), _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
        _delete(folder)
        path.unlink()
        return True
    return False


def _delete(folder: Path) -> None:
    """Delete a folder. Renames it first, so that a partly deleted folder is never used."""
    temporary = folder.with_name(f"{secrets.token_hex(8)}{SUFFIX}")
    folder.rename(temporary)
    shutil.rmtree(temporary)


def _used_at(folder: Path) -> float:
    return _lock_of(folder).stat().st_mtime


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    """Hold the lock of a folder. Raises: BlockingIOError, OSError."""
    file = _lock(path, how)
    try:
        yield
    finally:
        os.close(file)


def _lock(path: Path, how: int) -> int:
    """Open and lock the lock file of a folder. Raises: BlockingIOError, OSError."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, how)
            with suppress(FileNotFoundError):  # removed before it was locked
                if os.stat(path).st_ino == os.fstat(file).st_ino:
                    os.utime(file)
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def open_cache(settings: DeploySettings) -> Cache:
    """The configured cache; by default below XDG_CACHE_HOME."""
    folder = Path(settings.cache_dir or own_folder("cache") / "packages").expanduser()
    return Cache(folder, settings.max_cache_bytes)
