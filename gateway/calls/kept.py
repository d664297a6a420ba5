"""Answers that are kept with their conversations, so that later requests go on from them.

Only the tenant who asked finds them. The images of a conversation are held as long.
"""

import asyncio
import hashlib

from shared.blobs.api import BlobStore
from shared.protocol import ImageRef
from shared.records.api import Record, RecordStore


class KeptAnswers:
    """Records and their images. All methods raise RecordsUnavailable, BlobsUnavailable."""

    def __init__(self, records: RecordStore, blobs: BlobStore, ttl_s: float) -> None:
        self._records = records
        self._blobs = blobs
        self._ttl_s = ttl_s

    async def put(self, tenant: str, name: str, data: bytes, images: tuple[ImageRef, ...]) -> None:
        """Keep an answer; the oldest make room. Without a time to live, nothing is kept."""
        if self._ttl_s <= 0:
            return
        holder = _holder(name)
        holds = (self._blobs.hold(image, holder, ttl_s=self._ttl_s) for image in set(images))
        await asyncio.gather(*holds)
        made_room = await self._records.put(_owner(tenant), name, Record(data, images))
        for other, record in made_room:
            self._blobs.release(_holder(other), record.images)

    async def get(self, tenant: str, name: str) -> Record | None:
        """The answer of that name, if it is kept."""
        return await self._records.get(_owner(tenant), name)

    async def delete(self, tenant: str, name: str) -> bool:
        """Forget an answer; whether it was there."""
        record = await self._records.delete(_owner(tenant), name)
        if record is not None:
            self._blobs.release(_holder(name), record.images)
        return record is not None


def _owner(tenant: str) -> str:
    """The owner of what a tenant's requests make; no secret."""
    return hashlib.sha256(b"records " + tenant.encode()).hexdigest()[:32]


def _holder(name: str) -> str:
    return f"record:{name}"
