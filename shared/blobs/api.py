"""What gateways and workers ask of a store of blobs: bytes by their SHA-256, kept as long as somebody holds them."""

from collections.abc import Awaitable, Sequence
from typing import Protocol

from shared.protocol import BlobRef


class BlobsUnavailable(Exception):
    """The store cannot be reached or takes no more data."""


class BlobStore(Protocol):
    """The blobs of one fleet."""

    async def put(
        self, data: bytes, holder: str, *, ttl_s: float, ref: BlobRef | None = None
    ) -> BlobRef:
        """Keep bytes until every holder has released them, or at least `ttl_s` if this one does not.

        `ref`: where the caller knows their hash already. Bytes that are there are not sent again.
        Raises: BlobsUnavailable.
        """
        ...

    async def get(self, ref: BlobRef) -> bytes | None:
        """The bytes; None if they are not there or not those of the hash. Raises: BlobsUnavailable."""
        ...

    async def hold(self, ref: BlobRef, holder: str, *, ttl_s: float) -> bool:
        """Keep bytes that are there for a further holder, as `put`; False if they are not.

        Raises: BlobsUnavailable.
        """
        ...

    def release(self, holder: str, refs: Sequence[BlobRef] = ()) -> Awaitable[None]:
        """Let go of all that a holder has put here; begins at once, and need not be awaited.

        `refs`: of another process, which may have put them for it. What the store does not learn of goes at the end of its time. Raises nothing.
        """
        ...

    async def close(self) -> None:
        """Say what is still to be said, and hang up."""
        ...
