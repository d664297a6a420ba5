"""A partially downloaded file. After an interruption, the next writer resumes at its end."""

import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from errno import ENOENT
from pathlib import Path

PIECE_BYTES = 4 * 1024 * 1024
SUFFIX = ".part"
_MOVES = 100

Read = Callable[[int], Iterable[bytes]]  #: returns the bytes from an offset to the end
Report = Callable[[int], None]  #: called with the number of bytes done


class WrongDigest(Exception):
    """The bytes do not match the expected digest; the message has both digests."""


class ResumableFile:
    """A partially downloaded blob. One writer locks the file and resumes it; concurrent writers use separate files.

    Existing bytes are hashed again, because a crash of the machine may have lost some of them.
    """

    def __init__(self, folder: Path, digest: str) -> None:
        """Raises: OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = part_path(folder, digest)
        self._digest = digest
        self._stays, self._is_moved = True, False
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        if not self._lock():
            os.close(self._file)
            self._stays = False
            self.path = folder / f"{secrets.token_hex(8)}{SUFFIX}"
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self.size = 0
        self._found = hashlib.sha256()
        while piece := os.read(self._file, PIECE_BYTES):
            self._found.update(piece)
            self.size += len(piece)

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.stat(self.path).st_ino == os.fstat(self._file).st_ino
        except OSError:  # the file is locked or complete, or the file system has no locks
            return False

    def __enter__(self) -> "ResumableFile":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Keep the file if another writer can resume it."""
        is_refused = isinstance(error, WrongDigest) or self._is_right
        # once it is moved, the old name may be another writer's
        if not self._is_moved and (is_refused or not (self._stays and self.size)):
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def fill(self, read: Read, report: Report | None = None) -> None:
        """Append the bytes of `read(size)`. If the digest is wrong after a resume, write the whole file again.

        Raises: WrongDigest, OSError, and what `read` raises.
        """
        was_there = self.size
        self._write(read, report)
        if was_there and not self._is_right:
            if report is not None:
                report(-self.size)
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            self.size, self._found = 0, hashlib.sha256()
            self._write(read, report)
        if not self._is_right:
            found = self._found.hexdigest()
            raise WrongDigest(f"the content has the digest sha256:{found}, not {self._digest}")

    @property
    def _is_right(self) -> bool:
        return f"sha256:{self._found.hexdigest()}" == self._digest

    def _write(self, read: Read, report: Report | None) -> None:
        if report is not None and self.size:
            report(self.size)
        for piece in read(self.size):
            self._found.update(piece)
            self.size += len(piece)
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            if report is not None:
                report(len(piece))

    def move(self, target: Path, mode: int = 0o644) -> None:
        """Sync the file and rename it to `target`. Raises: OSError."""
        os.fchmod(self._file, mode)
        os.fsync(self._file)
        place(os.replace, self.path, target)
        self._is_moved = True


def place(move: Callable[[Path, Path], None], path: Path, target: Path) -> None:
    """Move a finished file to `target` and sync its folder. Raises: OSError.

    Creates the folder again if another process removes it while it is empty.
    """
    for _ in range(_MOVES):
        with suppress(FileNotFoundError):
            with suppress(
                FileExistsError
            ):  # also raised for a folder that is removed while mkdir checks it
                target.parent.mkdir(parents=True, exist_ok=True)
            move(path, target)
            break
    else:
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(target))
    with suppress(FileNotFoundError):  # it is already removed
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def part_path(folder: Path, digest: str) -> Path:
    return folder / (digest.removeprefix("sha256:") + SUFFIX)


def remove_old_parts(folder: Path, before: float) -> int:
    """Remove files last written before `before` (epoch seconds). Returns the number of bytes removed."""
    num_bytes = 0
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(file)
                if found.st_mtime < before:
                    path.unlink()
                    num_bytes += found.st_size
            finally:
                os.close(file)
    return num_bytes
