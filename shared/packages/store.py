"""Stores package blobs and deployment records in a directory or a bucket.

Blobs are stored as in an OCI image layout (`blobs/sha256/HEX`), records in other folders. Both are immutable: a blob
is named by its hash, and a record is written once, by the first writer.
"""

import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import ENOENT
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import urlsplit

from shared.packages.manifest import Manifest, decode_manifest, digest_of, is_digest
from shared.settings import first_line

PIECE_BYTES = 4 * 1024 * 1024
SUFFIX = ".part"
_MOVES = 100

Read = Callable[[int], Iterable[bytes]]  #: returns the bytes from an offset to the end
Report = Callable[[int], None]  #: called with the number of bytes done
SCHEMES = ("file", "s3", "gs", "az", "memory")


class StoreError(Exception):
    """The store failed; the message has the reason and what to do."""


class WrongStart(StoreError):
    """The start of a resumed upload is not the end of the stored part; another upload may have changed the part."""


class BadBlob(StoreError):
    """The bytes do not match the digest; the message has both digests."""


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
        is_refused = isinstance(error, BadBlob) or self._is_right
        # after a move, the old name can belong to another writer
        if not self._is_moved and (is_refused or not (self._stays and self.size)):
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def fill(self, read: Read, report: Report | None = None) -> None:
        """Append the bytes of `read(size)`. If the digest is wrong after a resume, write the whole file again.

        Raises: BadBlob, OSError, and the errors of `read`.
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
        _compare(self._digest, self._found)

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
            # mkdir also raises this error if the folder is removed while mkdir checks it.
            with suppress(FileExistsError):
                target.parent.mkdir(parents=True, exist_ok=True)
            move(path, target)
            break
    else:
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(target))
    with suppress(FileNotFoundError):  # the folder is already removed
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


class Entry(NamedTuple):
    """An object in the store. Units: epoch seconds, of the store's clock."""

    key: str
    size: int
    modified_at: float


def open_store(url: str) -> "PackageStore":
    """The store of a URL: file:///DIRECTORY, s3://, gs:// or az:// with bucket and prefix. Raises: StoreError."""
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise StoreError(f"{url}: use file:///DIRECTORY, s3://BUCKET/PREFIX, gs://... or az://...")
    if scheme == "file":
        return FileStore(Path(url.removeprefix("file://")))
    return ObjectStore(url)


class FileStore:
    """Blobs by digest and records by key in a directory, which several machines can share.

    All methods block, and raise StoreError. Files are written to `uploads`, synced, and renamed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"file://{root}"

    def size(self, digest: str) -> int | None:
        """Size of a blob; None if it does not exist."""
        try:
            return self._blob(digest).stat().st_size
        except OSError:
            return None

    def partial(self, digest: str) -> int:
        """Bytes of an interrupted upload; 0 if it cannot be resumed."""
        try:
            self._blob(digest)  # checks the digest
            return part_path(self._uploads, digest).stat().st_size
        except OSError:
            return 0

    def put(
        self, digest: str, file: IO[bytes], report: Report | None = None, start: int = 0
    ) -> None:
        """Store a complete blob. Raises: BadBlob.

        If the file is seekable, the upload resumes after the stored part. Otherwise the file begins at byte `start`;
        WrongStart is raised if `start` is not `partial(digest)`.
        """
        target = self._blob(digest)

        def read(place: int) -> Iterator[bytes]:
            if file.seekable():
                file.seek(place - start)
            elif place != start:
                raise WrongStart(f"{place} bytes of {digest} are stored; resume there")
            yield from iter(lambda: file.read(PIECE_BYTES), b"")

        try:
            layout = self.root / "oci-layout"  # the marker of an OCI image layout
            if not layout.exists():
                self.root.mkdir(parents=True, exist_ok=True)
                layout.write_text('{"imageLayoutVersion":"1.0.0"}')
            with ResumableFile(self._uploads, digest) as part:
                part.fill(read, report)
                part.move(target)
        except OSError as error:
            raise StoreError(f"{self._uploads} cannot be written: {error.strerror}") from error

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write a record unless it exists. Returns True if the record was written."""
        target = self.root / key
        with self._upload([data]) as part:
            try:
                place(os.link, part, target)  # a rename would replace a record
            except FileExistsError:
                return False
        return True

    def get(self, key: str) -> bytes | None:
        """A record; None if it does not exist."""
        try:
            return (self.root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"{self.url}: {key} cannot be read: {error.strerror}") from None

    def list(self, prefix: str) -> list[str]:
        """The keys of records below a folder, sorted."""

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # another process may remove a folder
                raise StoreError(f"{self.url}: {prefix} cannot be read: {error.strerror}")

        walked = os.walk(self.root / prefix, onerror=fail)
        found = (Path(folder, name) for folder, _, names in walked for name in names)
        return sorted(str(file.relative_to(self.root)) for file in found)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """The objects below a folder, in any order."""
        for key in self.list(prefix):
            with suppress(FileNotFoundError):
                found = (self.root / key).stat()
                yield Entry(key, found.st_size, found.st_mtime)

    def write(self, key: str, pieces: Iterable[bytes]) -> None:
        """Write or replace a record of any size, atomically."""
        target = self.root / key
        with self._upload(pieces) as part:
            place(os.replace, part, target)

    def stream(self, key: str, start: int = 0) -> Iterator[bytes]:
        """The bytes of a record or blob, unchecked. Raises: StoreError if it does not exist."""
        try:
            with (self.root / key).open("rb") as file:
                file.seek(start)
                while piece := file.read(PIECE_BYTES):
                    yield piece
        except OSError as error:
            raise StoreError(f"{self.url}: {key} cannot be read: {error.strerror}") from None

    def delete(self, key: str) -> None:
        """Delete an object, and the folders that become empty. Idempotent.

        Only `shared.packages.garbage` deletes objects of packages.
        """
        path = self.root / key
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{self.url}: {key} cannot be removed: {error.strerror}") from None
        with suppress(OSError):  # stops at the first folder that is not empty
            for folder in path.parents:
                if folder == self.root:
                    break
                folder.rmdir()

    def delete_parts(self, before: float) -> int:
        """Delete interrupted uploads last written before `before`. Returns the number of bytes deleted."""
        return remove_old_parts(self._uploads, before)

    @property
    def _uploads(self) -> Path:
        return self.root / "uploads"

    def _blob(self, digest: str) -> Path:
        return self.root / blob_key(digest)

    @contextmanager
    def _upload(self, pieces: Iterable[bytes]) -> Iterator[Path]:
        """A new, synced file in `uploads`. It is removed after the block, unless it was renamed or the process dies."""
        path = self._uploads / f"{secrets.token_hex(8)}{SUFFIX}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("xb") as file:
                    file.writelines(pieces)
                    file.flush()
                    os.fsync(file.fileno())
                yield path
            finally:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{path.parent} cannot be written: {error.strerror}") from error


class ObjectStore:
    """A `FileStore` in a bucket, accessed with obstore. Credentials are read from the cloud provider's environment variables."""

    def __init__(self, url: str) -> None:
        try:
            import obstore  # noqa: PLC0415 (an extra)
            from obstore.store import from_url  # noqa: PLC0415
        except ModuleNotFoundError:
            raise StoreError(f"{url} needs a package: pip install '.[store]'") from None
        self.url = url
        self._obstore = obstore
        try:
            self._store: Any = from_url(url)
        except Exception as error:  # the only common base class of obstore's errors
            raise StoreError(f"{url} cannot be opened: {first_line(error)}") from None

    def size(self, digest: str) -> int | None:
        with self._errors(), suppress(FileNotFoundError):
            return self._obstore.head(self._store, blob_key(digest))["size"]

    def partial(self, digest: str) -> int:
        """See `FileStore.partial`: a bucket's partial uploads cannot be read."""
        return 0

    def put(
        self, digest: str, file: IO[bytes], report: Report | None = None, start: int = 0
    ) -> None:
        if start:
            raise WrongStart(f"0 bytes of {digest} are stored; restart the upload")
        found = hashlib.sha256()

        def pieces() -> Iterator[bytes]:
            while piece := file.read(PIECE_BYTES):
                found.update(piece)
                if report is not None:
                    report(len(piece))
                yield piece
            # Compared during the upload, so that an error leaves no object.
            _compare(digest, found)

        with self._errors():
            try:
                self._obstore.put(self._store, blob_key(digest), pieces(), use_multipart=True)
            except Exception:
                if not file.read(1):
                    _compare(digest, found)
                raise

    def put_if_absent(self, key: str, data: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError  # noqa: PLC0415

        with self._errors(), suppress(AlreadyExistsError):
            self._obstore.put(self._store, key, data, mode="create", use_multipart=False)
            return True
        return False

    def get(self, key: str) -> bytes | None:
        with self._errors(), suppress(FileNotFoundError):
            return bytes(self._obstore.get(self._store, key).bytes())

    def list(self, prefix: str) -> list[str]:
        return sorted(entry.key for entry in self.entries(prefix))

    def entries(self, prefix: str) -> Iterator[Entry]:
        with self._errors():
            for page in self._obstore.list(self._store, prefix=prefix):
                for item in page:
                    yield Entry(item["path"], item["size"], item["last_modified"].timestamp())

    def write(self, key: str, pieces: Iterable[bytes]) -> None:
        with self._errors():
            self._obstore.put(self._store, key, iter(pieces), use_multipart=True)

    def stream(self, key: str, start: int = 0) -> Iterator[bytes]:
        options: Any = {"range": {"offset": start}} if start else None
        with self._errors():
            found = self._obstore.get(self._store, key, options=options)
            yield from map(bytes, found.stream(PIECE_BYTES))

    def delete(self, key: str) -> None:
        with self._errors(), suppress(FileNotFoundError):
            self._obstore.delete(self._store, key)

    def delete_parts(self, before: float) -> int:
        """See `FileStore.delete_parts`: lifecycle rules of the bucket delete partial uploads."""
        return 0

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise the errors of obstore as StoreError. Exception is their only common base class."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(f"{self.url}: {first_line(error)}") from None


PackageStore = FileStore | ObjectStore


def blob_key(digest: str) -> str:
    """The key of a blob in an OCI image layout. Raises: StoreError."""
    if not is_digest(digest):
        raise StoreError(f"{digest[:80]!r} is not a digest: write sha256: and 64 hex digits")
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def read_manifest(store: PackageStore, digest: str) -> Manifest:
    """The manifest of a package. Raises: StoreError, BadBlob, BadPackage."""
    data = store.get(blob_key(digest))
    if data is None:
        raise StoreError(f"{store.url} has no package {digest}")
    if digest_of(data) != digest:
        raise BadBlob(f"the manifest {digest} was changed in {store.url}")
    return decode_manifest(data)


def _compare(digest: str, found: Any) -> None:
    if found.hexdigest() != digest.removeprefix("sha256:"):
        raise BadBlob(f"the content has the digest sha256:{found.hexdigest()}, not {digest}")
