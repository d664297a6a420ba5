"""What is kept for later requests: answers with their conversations, and images that stand for a URL.

Only the tenant who asked finds them. The images of a conversation are held as long.
"""

import asyncio
import hashlib
from collections.abc import Sequence

from msgspec.structs import replace

from gateway.http.errors import InvalidRequest
from gateway.images.loader import ImageSource, LoadedImage
from shared.blobs.api import BlobStore
from shared.protocol import ImageRef
from shared.records.store import Record, RecordStore

#: How the file ids of images begin.
IMAGE_ID = "file-image-"
_BY_SHA256 = "sha256:"
_BY_NAME = (IMAGE_ID, _BY_SHA256)
_MAX_NAME_CHARS = 64


class KeptAnswers:
    """Records and their images. All methods raise RecordsUnavailable, BlobsUnavailable."""

    def __init__(self, records: RecordStore, blobs: BlobStore, ttl_s: float) -> None:
        self._records = records
        self._blobs = blobs
        self._ttl_s = ttl_s

    async def put(self, tenant: str, name: str, data: bytes, images: tuple[ImageRef, ...]) -> None:
        """Keep an answer, unless it is more than may be; the oldest make room.

        Without a time to live, nothing is kept.
        """
        if self._ttl_s <= 0:
            return
        await self.hold(name, images, self._ttl_s)
        await self._put(tenant, name, Record(data, images))

    async def hold(self, name: str, images: tuple[ImageRef, ...], ttl_s: float) -> None:
        """Hold the images of an answer that may be kept later."""
        holder = _holder(name)
        await asyncio.gather(*(self._blobs.hold(each, holder, ttl_s=ttl_s) for each in set(images)))

    async def put_image(self, tenant: str, image: LoadedImage, data: bytes) -> bool:
        """Keep an image and what is told of it, from now on for its time; False: it is more than may be kept."""
        if self._ttl_s <= 0:
            return False
        name = image_name(tenant, image.ref.sha256)
        await self._blobs.put(image.data, _holder(name), ttl_s=self._ttl_s, ref=image.ref)
        return await self._put(tenant, name, Record(data, (image.ref,)), anew=True)

    async def _put(self, tenant: str, name: str, record: Record, *, anew: bool = False) -> bool:
        """Keep a record whose images are held; whether it is kept."""
        made_room = await self._records.put(_owner(tenant), name, record, anew=anew)
        if made_room is None:
            self._blobs.release(_holder(name), record.images)
            return False
        for other, old in made_room:
            self._blobs.release(_holder(other), old.images)
        return True

    async def find_images(
        self, tenant: str, sources: Sequence[ImageSource]
    ) -> Sequence[ImageSource]:
        """The same, with those found that are named by id or SHA-256. Raises: InvalidRequest."""
        if not any(source.url.startswith(_BY_NAME) for source in sources):
            return sources
        return [await self._find_image(tenant, source) for source in sources]

    async def _find_image(self, tenant: str, source: ImageSource) -> ImageSource:
        if not source.url.startswith(_BY_NAME):
            return source
        name = source.url
        if name.startswith(_BY_SHA256):
            name = image_name(tenant, name.removeprefix(_BY_SHA256).lower())
        record = await self.get(tenant, name) if len(name) <= _MAX_NAME_CHARS else None
        if record is None:
            raise InvalidRequest(
                "No such image of this key's is kept, or not any more: upload it again, or send it "
                "as a data: URL.",
                param=source.param,
                code="file_not_found",
            )
        return replace(source, url="", ref=record.images[0])

    async def get(self, tenant: str, name: str) -> Record | None:
        """The answer of that name, if it is kept."""
        return await self._records.get(_owner(tenant), name)

    async def delete(self, tenant: str, name: str) -> bool:
        """Forget an answer; whether it was there."""
        record = await self._records.delete(_owner(tenant), name)
        if record is not None:
            self._blobs.release(_holder(name), record.images)
        return record is not None


def image_name(tenant: str, sha256: str) -> str:
    """The file id of an image of a tenant's."""
    return IMAGE_ID + hashlib.sha256(f"image {tenant} {sha256}".encode()).hexdigest()[:32]


def _owner(tenant: str) -> str:
    """The owner of what a tenant's requests make; no secret."""
    return hashlib.sha256(b"records " + tenant.encode()).hexdigest()[:32]


def _holder(name: str) -> str:
    return f"record:{name}"
