"""The interface of blob stores: a blob is stored under its SHA-256 while at least one request holds it."""

from collections.abc import Awaitable, Sequence
from hashlib import file_digest
from typing import IO, Protocol, TypeVar

from shared.protocol import BlobRef

Ref = TypeVar("Ref", bound=BlobRef)


class BlobsUnavailable(Exception):
    """The store cannot be reached, or is full."""


class BlobStore(Protocol):
    """Stores blobs until the requests that hold them have released them."""

    takes_files: bool
    """Whether `put` reads a file piece by piece, so that a blob can be larger than memory."""

    async def put(
        self, data: bytes | IO[bytes], holder: str, *, ttl_s: float, ref: BlobRef | None = None
    ) -> BlobRef:
        """Store a blob until each holder has released it or its `ttl_s` has passed. A stored blob is not sent again.

        `ref`: the reference, if the caller has computed it; required for a file. Raises: BlobsUnavailable.
        """
        ...

    async def get(self, ref: BlobRef) -> bytes | None:
        """The bytes of a blob that has no URL (`locate`); None if they do not exist or do not match the hash.

        Raises: BlobsUnavailable.
        """
        ...

    async def hold(self, ref: BlobRef, holder: str, *, ttl_s: float) -> bool:
        """Add a holder to a stored blob. Returns False if the blob does not exist. Raises: BlobsUnavailable."""
        ...

    async def locate(self, ref: Ref, ttl_s: float) -> Ref:
        """The reference for a `UrlBlobReader`. If the blob is not in Redis, it has a URL that is valid for `ttl_s`.

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
    """The SHA-256 of a file, which is at its beginning afterwards."""
    file.seek(0)
    digest = file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    file.seek(0)
    return digest
