"""The images of a request: from their URLs to checked bytes and the references that travel in the
queue.

Bytes stay encoded; decoding is the worker's. Large base64 is decoded off the event loop, in slices,
as decoding holds the interpreter lock.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from msgspec import Struct

from gateway.http.errors import InvalidRequest
from gateway.media.fetch import ImageFetcher
from gateway.media.header import FORMAT_NAMES, ImageRefused, check_header, read_header
from shared.blobs.api import BlobStore
from shared.protocol import ImageRef
from shared.settings.limits import LimitSettings

Encoded = TypeVar("Encoded", str, bytes)

_INLINE_CHARS = 256 * 1024  #: images up to this many characters or bytes are read on the event loop
_SLICE_CHARS = 1024 * 1024  #: a multiple of 4


class ImageSource(Struct, frozen=True):
    """An image of a request. `param`: its place in the request."""

    url: str
    param: str
    #: An image of an earlier request of the same tenant, instead of a URL.
    ref: ImageRef | None = None
    min_pixels: int = 0  #: the model's processor scales the image to it; 0: the model's own
    max_pixels: int = 0


class LoadedImage(Struct, frozen=True):
    """The checked bytes of an image, and its reference."""

    ref: ImageRef
    data: bytes


class ImageLoader:
    """Loads images within the limits. `fetcher`: None if remote URLs are disabled."""

    def __init__(
        self, limits: LimitSettings, fetcher: ImageFetcher | None, blobs: BlobStore | None = None
    ) -> None:
        self.limits = limits
        self.fetcher = fetcher
        self.blobs = blobs
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="image")

    async def load_all(
        self, sources: Sequence[ImageSource], reserve: Callable[[int], None]
    ) -> list[LoadedImage]:
        """Load images in order. `reserve` is called with a number of fetched bytes before they are stored.

        Raises: InvalidRequest that names the refused image; what `reserve` raises. The others are cancelled.
        """
        if all(_is_data(source.url) for source in sources):
            return [await self._load(source, reserve) for source in sources]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._load(source, reserve)) for source in sources]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def check(self, data: bytes, param: str) -> LoadedImage:
        """Check encoded bytes of another source. Raises: InvalidRequest."""
        try:
            return await self._off_loop(self._check, data)
        except ImageRefused as refused:
            raise InvalidRequest(refused.message, param=param, code=refused.code) from None

    async def _load(self, source: ImageSource, reserve: Callable[[int], None]) -> LoadedImage:
        try:
            if source.ref is not None:
                return await self._load_kept(source.ref, reserve)
            if _is_data(source.url):
                return await self._off_loop(self._from_data_url, source.url)
            return await self._off_loop(self._check, await self._fetch(source.url, reserve))
        except ImageRefused as refused:
            raise InvalidRequest(refused.message, param=source.param, code=refused.code) from None

    async def _load_kept(self, ref: ImageRef, reserve: Callable[[int], None]) -> LoadedImage:
        """Raises: ImageRefused, BlobsUnavailable."""
        reserve(ref.num_bytes)
        data = await self.blobs.get(ref) if self.blobs is not None else None
        if data is None:
            raise ImageRefused("An image of the conversation is no longer kept: send it again.")
        return LoadedImage(ref, data)

    async def _off_loop(
        self, work: Callable[[Encoded], LoadedImage], encoded: Encoded
    ) -> LoadedImage:
        """Run work that is proportional to a large argument in a thread."""
        if len(encoded) <= _INLINE_CHARS:
            return work(encoded)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, encoded)

    async def _fetch(self, url: str, reserve: Callable[[int], None]) -> bytes:
        if not url[:8].lower().startswith(("http://", "https://")):
            raise ImageRefused(
                "Unknown image URL: send a data: URL in base64, or an http(s) URL.",
                code="invalid_image_url",
            )
        if self.fetcher is None:
            raise ImageRefused(
                "Remote images are disabled: send a data: URL "
                "(the operator may set gateway.remote_images).",
                code="invalid_image_url",
            )
        return await self.fetcher.fetch(url, reserve)

    def _from_data_url(self, url: str) -> LoadedImage:
        comma = url.find(",", 0, 256)
        if comma < 0 or not url[:comma].lower().endswith(";base64"):
            raise ImageRefused(
                "The data: URL is not base64: send data:image/png;base64,...",
                code="invalid_image_url",
            )
        if (len(url) - comma - 1) // 4 * 3 > self.limits.max_image_bytes + 2:
            raise self._too_many_bytes()
        return self._check(decode_base64(url[comma + 1 :]))

    def _check(self, data: bytes) -> LoadedImage:
        if not data:
            raise ImageRefused(f"The image is empty: send {FORMAT_NAMES}.")
        if len(data) > self.limits.max_image_bytes:
            raise self._too_many_bytes()
        header = read_header(data)
        check_header(header, self.limits)
        digest = hashlib.sha256(data).hexdigest()
        ref = ImageRef(digest, len(data), header.media_type, header.width, header.height)
        return LoadedImage(ref, data)

    def _too_many_bytes(self) -> ImageRefused:
        return ImageRefused(
            f"The image is too large: send at most {self.limits.max_image_bytes} bytes.",
            code="image_too_large",
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _is_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def decode_base64(text: str) -> bytes:
    """Decode padded standard base64 with optional white space. Raises: ImageRefused.

    By msgspec, which is seven times as fast as binascii and also refuses redundant padding.
    """
    try:
        if len(text) <= _SLICE_CHARS:
            return msgspec.convert(text, bytes)
        slices = []
        for start in range(0, len(text), _SLICE_CHARS):
            piece = text[start : start + _SLICE_CHARS]
            if piece.endswith("=") and start + _SLICE_CHARS < len(text):
                raise ValueError  # padding in the middle
            slices.append(msgspec.convert(piece, bytes))
        return b"".join(slices)
    except ValueError:
        if len(packed := "".join(text.split())) < len(text):
            return decode_base64(packed)
        raise ImageRefused(
            "The image is not valid base64: send the standard alphabet with padding."
        ) from None
