"""The images, videos and audio of a request: from their URLs to checked bytes and the references that travel in the
queue.

Workers decode the files. Large base64 is decoded off the event loop, in slices, as decoding holds the interpreter
lock. A video or audio file that is fetched or uploaded can be larger than memory: it stays on disk.
"""

import asyncio
import hashlib
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryFile
from typing import IO, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.http.errors import InvalidRequest
from gateway.media.fetch import ImageFetcher
from gateway.media.header import (
    ImageRefused,
    check_header,
    find_audio,
    find_container,
    find_kind,
    read_header,
)
from shared.blobs.api import hash_of_file
from shared.media import MEDIA
from shared.protocol import FRAMES_TYPE, ImageRef, MediaKind, VideoOptions
from shared.settings.limits import LimitSettings

Encoded = TypeVar("Encoded", str, bytes)

_INLINE_CHARS = 256 * 1024  #: images up to this many characters or bytes are read on the event loop
_LEAST_BYTES_PER_S = 1024 * 1024  #: of a fetched video or audio
_SLICE_CHARS = 1024 * 1024  #: a multiple of 4
_HEAD_BYTES = 1024  #: bytes of a video or audio file that tell its type


class ImageSource(Struct, frozen=True):
    """An image, video or audio of a request. `param`: its field in the request."""

    url: str
    param: str
    #: A stored image of the same tenant, instead of a URL.
    ref: ImageRef | None = None
    min_pixels: int = 0  #: to scale the image to; 0: the model's own
    max_pixels: int = 0
    video: VideoOptions | None = None  #: of a video
    if_video: VideoOptions | None = None  #: of a file by id, if it is a video
    is_audio: bool = False

    @property
    def kind(self) -> MediaKind:
        """A file by id counts as an image until it is resolved."""
        if self.is_audio:
            return "audio"
        if self.video is not None:
            return "video"
        return "image" if self.ref is None else self.ref.kind


class LoadedImage(Struct, frozen=True):
    """The reference of an image, video or audio, and its content if it is not stored yet."""

    ref: ImageRef
    data: bytes | IO[bytes] | None

    def close(self) -> None:
        if self.data is not None and not isinstance(self.data, bytes):
            self.data.close()


class ImageLoader:
    """Loads images within the limits. `fetcher`: None if remote URLs are disabled."""

    def __init__(
        self, limits: LimitSettings, fetcher: ImageFetcher | None, *, uses_disk: bool = False
    ) -> None:
        """`uses_disk`: whether videos and audio are fetched to files on disk."""
        self.limits = limits
        self.fetcher = fetcher
        self.uses_disk = uses_disk
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="image")

    async def load_all(
        self,
        sources: Sequence[ImageSource],
        reserve: Callable[[int], None],
    ) -> list[LoadedImage]:
        """Load images in order. `reserve` is called with a number of fetched bytes before they are stored.

        Stored images are not read. Raises: InvalidRequest that names the refused image; what `reserve` raises. Other
        loads are cancelled.
        """
        if all(_is_data(source.url) for source in sources):
            return [await self._load(source, reserve) for source in sources]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._load(each, reserve)) for each in sources]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    async def check(self, file: IO[bytes], param: str) -> LoadedImage:
        """Check an uploaded file. Raises: InvalidRequest."""
        kind = find_kind(_look_at(file)[0])
        video = VideoOptions() if kind == "video" else None
        source = ImageSource("", param, video=video, is_audio=kind == "audio")
        try:
            return await self._check_file(file, source)
        except ImageRefused as refused:
            raise InvalidRequest(refused.message, param=param, code=refused.code) from None

    async def _load(self, source: ImageSource, reserve: Callable[[int], None]) -> LoadedImage:
        try:
            if source.ref is not None:
                return LoadedImage(_as_asked(source.ref, source), None)
            if _is_data(source.url):
                from_url = partial(self._from_data_url, source=source)
                return await self._off_loop(from_url, source.url)
            file = await self._fetch(source, reserve)
            try:
                return await self._check_file(file, source)
            except BaseException:
                file.close()
                raise
        except ImageRefused as refused:
            raise InvalidRequest(refused.message, param=source.param, code=refused.code) from None

    async def _off_loop(
        self, work: Callable[[Encoded], LoadedImage], encoded: Encoded
    ) -> LoadedImage:
        """Run work that is proportional to a large argument in a thread."""
        if len(encoded) <= _INLINE_CHARS:
            return work(encoded)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, encoded)

    async def _fetch(self, source: ImageSource, reserve: Callable[[int], None]) -> IO[bytes]:
        url = source.url
        if not url[:8].lower().startswith(("http://", "https://")):
            raise ImageRefused(
                "Unknown URL: send a data: URL in base64, or an http(s) URL.",
                code="invalid_image_url",
            )
        if self.fetcher is None:
            raise ImageRefused(
                "Remote URLs are disabled: send a data: URL "
                "(the operator may set gateway.remote_images).",
                code="invalid_image_url",
            )
        most = MEDIA[source.kind].max_bytes(self.limits)
        is_image = source.kind == "image"
        more_s = 0.0 if is_image else most / _LEAST_BYTES_PER_S
        with ExitStack() as stack:
            on_disk = self.uses_disk and not is_image
            file = stack.enter_context(TemporaryFile()) if on_disk else io.BytesIO()
            await self.fetcher.fetch(url, file, reserve, most, more_s)
            stack.pop_all()  # the file stays open
            return file

    def _from_data_url(self, url: str, source: ImageSource) -> LoadedImage:
        comma = url.find(",", 0, 256)
        head = url[:comma].lower()
        if comma < 0 or not head.endswith(";base64"):
            example = MEDIA[source.kind].media_type
            raise ImageRefused(
                f"The data: URL is not base64: send data:{example};base64,...",
                code="invalid_image_url",
            )
        self._check_bytes((len(url) - comma - 1) // 4 * 3 - 2, source.kind)
        if source.video is not None and head == f"data:{FRAMES_TYPE};base64":
            return self._from_frames(url[comma + 1 :].split(","), source.video)
        return self._check(decode_base64(url[comma + 1 :]), source)

    def _from_frames(self, encoded: Sequence[str], video: VideoOptions) -> LoadedImage:
        """A video of JPEG frames, which are all used. Raises: ImageRefused."""
        if video.num_frames is not None or video.start_s or video.end_s:
            raise ImageRefused(
                "A video of frames has no num_frames, start_s or end_s: send only the frames to use."
            )
        if len(encoded) > self.limits.max_video_frames:
            raise ImageRefused(
                f"The video has {len(encoded)} frames: send at most {self.limits.max_video_frames}.",
                code="image_too_large",
            )
        frames = [decode_base64(each) for each in encoded]
        headers = [read_header(frame) for frame in frames]
        first = headers[0]
        most = self.limits.max_frame_pixels
        if first.width * first.height > most:
            raise ImageRefused(
                f"Frames of {first.width} x {first.height} are too large: send at most {most} pixels.",
                code="image_too_large",
            )
        for number, header in enumerate(headers):
            check_header(header, self.limits)
            if header != first or header.media_type != "image/jpeg":
                raise ImageRefused(f"Frame {number}: send JPEG frames of equal size.")
        return _refer(msgspec.msgpack.encode(frames), FRAMES_TYPE, 0, 0, video)

    async def _check_file(self, file: IO[bytes], source: ImageSource) -> LoadedImage:
        """Raises: ImageRefused."""
        if isinstance(file, io.BytesIO):
            return await self._off_loop(partial(self._check, source=source), file.getvalue())
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._check, file, source)

    def _check(self, data: bytes | IO[bytes], source: ImageSource) -> LoadedImage:
        kind, formats = source.kind, MEDIA[source.kind].formats
        head, num_bytes = _look_at(data)
        if not num_bytes:
            raise ImageRefused(f"The {kind} is empty: send {formats}.")
        self._check_bytes(num_bytes, kind)
        if kind == "image":
            data = data if isinstance(data, bytes) else data.read()
            header = read_header(data)
            check_header(header, self.limits)
            return _refer(data, header.media_type, header.width, header.height, None)
        media_type = find_audio(head) if kind == "audio" else find_container(head)
        if media_type is None:
            raise ImageRefused(f"Unsupported {kind}: send {formats}.", code="unsupported_image")
        return _refer(data, media_type, 0, 0, source.video)

    def _check_bytes(self, num_bytes: int, kind: MediaKind) -> None:
        most = MEDIA[kind].max_bytes(self.limits)
        if num_bytes > most:
            message = f"The {kind} is too large: send at most {most} bytes."
            raise ImageRefused(message, code="image_too_large")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _as_asked(ref: ImageRef, source: ImageSource) -> ImageRef:
    """The reference of a stored image as the kind and with the options of the request. Raises: ImageRefused."""
    if source.is_audio and ref.kind == "video":
        media_type = ref.media_type.replace("video/", "audio/")
        ref = replace(ref, video=None, media_type=media_type)
    if ref.kind != source.kind:
        raise ImageRefused(f"The file is of the kind {ref.kind}: send it as {ref.kind}_url.")
    return ref if source.video is None else replace(ref, video=source.video)


def _refer(
    data: bytes | IO[bytes], media_type: str, width: int, height: int, video: VideoOptions | None
) -> LoadedImage:
    is_bytes = isinstance(data, bytes)
    digest = hashlib.sha256(data).hexdigest() if is_bytes else hash_of_file(data)
    _, num_bytes = _look_at(data)
    return LoadedImage(ImageRef(digest, num_bytes, media_type, width, height, video=video), data)


def _look_at(data: bytes | IO[bytes]) -> tuple[bytes, int]:
    """The first bytes and the length. A file is at its beginning afterwards."""
    if isinstance(data, bytes):
        return data[:_HEAD_BYTES], len(data)
    num_bytes = data.seek(0, io.SEEK_END)
    data.seek(0)
    head = data.read(_HEAD_BYTES)
    data.seek(0)
    return head, num_bytes


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
            "The data: URL is not valid base64: send the standard alphabet with padding."
        ) from None
