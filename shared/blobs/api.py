"""The interface of blob stores: bytes by their SHA-256, kept while a request holds them."""

from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar

from shared.protocol import BlobRef

Ref = TypeVar("Ref", bound=BlobRef)


class BlobsUnavailable(Exception):
    """The store cannot be reached, or is full."""


class BlobReader(Protocol):
    """Reads blobs by their references."""

    async def get(self, ref: BlobRef) -> bytes | None:
        """The bytes; None if they do not exist or do not match the hash. Raises: BlobsUnavailable."""
        ...


class BlobStore(BlobReader, Protocol):
    """Blobs, and the requests that hold them."""

    async def put(
        self, data: bytes, holder: str, *, ttl_s: float, ref: BlobRef | None = None
    ) -> BlobRef:
        """Store bytes until every holder has released them or its `ttl_s` has passed. Existing bytes are not sent again.

        `ref`: the reference, if the caller has computed it. Raises: BlobsUnavailable.
        """
        ...

    async def hold(self, ref: BlobRef, holder: str, *, ttl_s: float) -> bool:
        """Add a holder to an existing blob, as `put`; returns False if it does not exist. Raises: BlobsUnavailable."""
        ...

    async def locate(self, ref: Ref, ttl_s: float) -> Ref:
        """The reference for a worker, with a URL that is valid for `ttl_s` if the blob is not in Redis.

        Raises: BlobsUnavailable.
        """
        ...

    def release(self, holder: str, refs: Sequence[BlobRef] = ()) -> Awaitable[None]:
        """Release all blobs of a holder, in the background. Raises nothing; blobs that are not released expire.

        `refs`: blobs that another process may have stored for this holder.
        """
        ...

    async def open(self) -> None:
        """Connect before the first blob."""
        ...

    async def close(self) -> None:
        """Finish the releases, and disconnect."""
        ...
