"""Stored answers with their conversations, and stored images that requests refer to by id.

Only the tenant that stored an answer or image can read it. The images of a conversation are retained as long as the
conversation.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import IO

from msgspec.structs import replace

from gateway.http.endpoint import owner_of
from gateway.http.errors import InvalidRequest
from gateway.media.loader import ImageSource, LoadedImage
from shared.blobs.api import BlobStore
from shared.protocol import ImageRef
from shared.records.store import Record, RecordStore

#: Prefix of image file ids.
IMAGE_ID = "file-image-"
_BY_SHA256 = "sha256:"
BY_NAME = (IMAGE_ID, _BY_SHA256)
_MAX_NAME_CHARS = 64


@dataclass
class KeptAnswers:
    """Stores answers and images. All methods raise RecordsUnavailable, BlobsUnavailable."""

    _records: RecordStore
    _blobs: BlobStore
    open: Callable[[ImageRef], Awaitable[IO[bytes] | None]]  #: opens a stored image, if it exists
    _ttl_s: float

    async def put(self, tenant: str, name: str, data: bytes, images: tuple[ImageRef, ...]) -> None:
        """Store an answer. Beyond the limit, the oldest answers are evicted. Does nothing if the time to live is 0."""
        if self._ttl_s <= 0:
            return
        await self.hold(name, images, self._ttl_s)
        await self._put(tenant, name, Record(data, images))

    async def hold(self, name: str, images: tuple[ImageRef, ...], ttl_s: float) -> None:
        """Retain the images of an answer that may be stored later."""
        holder = _holder(name)
        await asyncio.gather(*(self._blobs.hold(each, holder, ttl_s=ttl_s) for each in set(images)))

    async def put_image(self, tenant: str, image: LoadedImage, data: bytes) -> bool:
        """Store an image with its record `data`, or renew its expiry. Returns whether it was stored."""
        if self._ttl_s <= 0:
            return False
        name = image_name(tenant, image.ref.sha256)
        assert image.data is not None
        await self._blobs.put(image.data, _holder(name), ttl_s=self._ttl_s, ref=image.ref)
        return await self._put(tenant, name, Record(data, (image.ref,)), anew=True)

    async def _put(self, tenant: str, name: str, record: Record, *, anew: bool = False) -> bool:
        """Store a record; returns False if it is too large. Releases the images of records that are not kept."""
        made_room = await self._records.put(owner_of(tenant, "records"), name, record, anew=anew)
        if made_room is None:
            self._blobs.release(_holder(name), record.images)
            return False
        for other, old in made_room:
            self._blobs.release(_holder(other), old.images)
        return True

    async def find_images(self, tenant: str, sources: Sequence[ImageSource]) -> list[ImageSource]:
        """Resolve images that are named by id or SHA-256. Raises: InvalidRequest."""
        return [await self._find_image(tenant, source) for source in sources]

    async def _find_image(self, tenant: str, source: ImageSource) -> ImageSource:
        name, is_name = source.url, source.url.startswith(BY_NAME)
        if not is_name and not source.param.endswith("file_id"):
            return source
        if name.startswith(_BY_SHA256):
            name = image_name(tenant, name.removeprefix(_BY_SHA256).lower())
        is_name &= len(name) <= _MAX_NAME_CHARS
        record = await self.get(tenant, name) if is_name else None
        if record is None:
            message = "This key has no such image, or it has expired: upload it again, or send a data: URL."
            raise InvalidRequest(message, param=source.param, code="file_not_found")
        [ref, *_] = record.images
        if ref.video is not None and source.if_video is not None:
            ref = replace(ref, video=source.if_video)
        return replace(source, url="", ref=ref)

    async def get(self, tenant: str, name: str) -> Record | None:
        return await self._records.get(owner_of(tenant, "records"), name)

    async def images(self, tenant: str) -> list[Record]:
        """The records of a tenant's images, oldest first."""
        names = await self._records.names(owner_of(tenant, "records"))
        return [r for n in names if n.startswith(IMAGE_ID) if (r := await self.get(tenant, n))]

    async def delete_all(self, tenant: str) -> int:
        names = await self._records.names(owner_of(tenant, "records"))
        return sum([await self.delete(tenant, name) for name in names])

    async def delete(self, tenant: str, name: str) -> bool:
        record = await self._records.delete(owner_of(tenant, "records"), name)
        if record is not None:
            self._blobs.release(_holder(name), record.images)
        return record is not None


def image_name(tenant: str, sha256: str) -> str:
    """The file id of a tenant's image."""
    return IMAGE_ID + hashlib.sha256(f"image {tenant} {sha256}".encode()).hexdigest()[:32]


def _holder(name: str) -> str:
    return f"record:{name}"
