"""What gateways ask of a store of records."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from shared.protocol import ImageRef


class RecordsUnavailable(Exception):
    """The store cannot be reached or takes no more data."""


class Record(msgspec.Struct, frozen=True):
    """What is kept under a name: bytes, and images beside them."""

    data: bytes
    images: tuple[ImageRef, ...] = ()

    @property
    def num_bytes(self) -> int:
        return len(self.data) + sum(image.num_bytes for image in self.images)


class RecordStore(Protocol):
    """The records of one fleet, by their owner and a name. All methods raise RecordsUnavailable."""

    async def put(
        self, owner: str, name: str, record: Record, *, anew: bool = False
    ) -> Sequence[tuple[str, Record]] | None:
        """Keep a record. A second put changes nothing, unless `anew`: then it counts from now on.

        Returns the names and records that made room, the oldest; None: it is larger than all of an
        owner's may be, and is not kept.
        """
        ...

    async def get(self, owner: str, name: str) -> Record | None:
        """The record, if it is there."""
        ...

    async def delete(self, owner: str, name: str) -> Record | None:
        """Drop a record. Returns it, if it was there."""
        ...

    async def close(self) -> None: ...
