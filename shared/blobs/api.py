"""The interface of blob stores: a blob is stored under its SHA-256 while at least one request holds it."""

from collections.abc import Awaitable, Sequence
from hashlib import file_digest
from typing import IO, Protocol, TypeVar

from shared.protocol import BlobRef

Ref = TypeVar("Ref", bound=BlobRef)


class BlobsUnavailable(Exception):
    """The store cannot be reached, or is full."""


class BlobStore(Protocol):
    """Stores each blob until all requests that hold it have released it."""

    takes_files: bool
    """True if `put` reads a file in chunks, so that a blob can be larger than memory."""

    async def put(
        self, data: bytes | IO[bytes], holder: str, *, ttl_s: float, ref: BlobRef | None = None
    ) -> BlobRef:
        """Store a blob until every holder has released it or `ttl_s` has passed. A stored blob is not sent again.

        `ref`: the reference, if the caller has computed it; required for a file. Raises: BlobsUnavailable.
        """
        ...

    async def get(self, ref: BlobRef) -> bytes | None:
        """The bytes of a blob without a URL (see `locate`); None if the blob is missing or its hash differs.

        Raises: BlobsUnavailable.
        """
        ...

    async def hold(self, ref: BlobRef, holder: str, *, ttl_s: float) -> bool:
        """Add a holder to a stored blob. Returns False if the blob does not exist. Raises: BlobsUnavailable."""
        ...

    async def locate(self, ref: Ref, ttl_s: float) -> Ref:
        """The reference for a `UrlBlobReader`: with a URL that is valid for `ttl_s`, unless the blob is in Redis.

        Raises: BlobsUnavailable.
        """
        ...

    def release(self, holder: str, refs: Sequence[BlobRef] = ()) -> Awaitable[None]:
        """Release all blobs of a holder in the background. Raises nothing: if a release fails, the blob expires later.

        `refs`: blobs that another process may have stored for this holder.
        """
        ...

    async def close(self) -> None:
        """Wait for pending releases, and disconnect."""
        ...


def hash_of_file(file: IO[bytes]) -> str:
    """The SHA-256 of a file. Resets the file's position to 0."""
    file.seek(0)
    digest = file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    file.seek(0)
    return digest
