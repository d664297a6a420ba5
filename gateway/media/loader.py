"""Load the images, videos and audio of a request: check their bytes, and create the references for the queue.

Workers decode the files. Large base64 is decoded in slices outside the event loop, because decoding holds the
interpreter lock. Fetched and uploaded videos and audio can be larger than memory: they stay on disk, if possible.

Format and size of an image (PNG, JPEG, WebP, GIF, AVIF) are read from its headers. The client's media type is ignored.
This is cheap enough for the event loop and immune to decompression bombs, because pixel data is never decoded. Workers
may still refuse the image.

Source: PNG specification section 5.2 and 11.2.2; ITU T.81 annex B; RFC 9649 section 2; GIF89a section 18;
ISO/IEC 14496-12 section 4 (boxes) and 23008-12 sections 8.11.4, 9.3 and 6.5.3 (pitm, iprp, ispe).
"""

import asyncio
import hashlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from struct import error as StructError
from struct import unpack_from
from tempfile import TemporaryFile
from typing import IO

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from gateway.http.errors import InvalidRequest
from gateway.media.fetch import ImageFetcher, ImageRefused
from shared.blobs.api import hash_of_file
from shared.media import MEDIA
from shared.protocol import FRAMES_TYPE, ImageRef, MediaKind, VideoOptions
from shared.settings.limits import LimitSettings

_MP4_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"skip", b"free"})
_AUDIO = {b"OggS": "audio/ogg", b"fLaC": "audio/flac", b"ID3": "audio/mpeg"}
_AUDIO_OF_VIDEO = {"video/mp4": "audio/mp4", "video/webm": "audio/webm"}
_M4A_BRANDS = (b"M4A ", b"M4B ")
_TS_PACKET_BYTES = 188
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MAX_PNG_CHUNKS = 10_000
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # SOF0..SOF15; not DHT, JPG, DAC
_JPEG_END, _JPEG_SCAN = 0xD9, 0xDA
_JPEG_MARKER = re.compile(rb"\xff{1,255}[^\xff]", re.DOTALL)  # a marker, possibly after fill bytes
_JPEG_MARKER_IN_SCAN = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd7]")  # scans escape 255 as 255, 0
_MAX_JPEG_SEGMENTS = 4096
_MAX_JPEG_SCANS = 100  #: encoders write about ten
_MAX_AVIF_BOXES = 1000  #: within one box
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length

_INLINE_CHARS = 256 * 1024  #: images up to this many characters or bytes are read on the event loop
_LEAST_BYTES_PER_S = 1024 * 1024  #: minimum rate of a fetched video or audio
_SLICE_CHARS = 1024 * 1024  #: a multiple of 4, the length of a base64 group
_HEAD_BYTES = 1024  #: leading bytes that determine the type of a video or audio file


class ImageHeader(Struct, frozen=True):
    media_type: str
    width: int
    height: int


def read_header(data: bytes) -> ImageHeader:
    """Read format and size. Raises: ImageRefused for other formats and for broken headers."""
    try:
        if data.startswith(_PNG_SIGNATURE):
            return _read_png(data)
        if data.startswith(b"\xff\xd8\xff"):
            return _read_jpeg(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _read_webp(data)
        if data[:6] in (b"GIF87a", b"GIF89a"):
            width, height = unpack_from("<HH", data, 6)
            return ImageHeader("image/gif", width, height)
        if data[4:8] == b"ftyp" and _is_avif(data):
            return _read_avif(data)
    except (IndexError, ValueError, StructError):
        raise ImageRefused("The image is damaged: its size cannot be read.") from None
    message = f"Unsupported image: send {MEDIA['image'].formats}."
    raise ImageRefused(message, code="unsupported_image")


def find_container(data: bytes) -> str | None:
    """The media type of a video file; None for other files. Workers check the remaining content."""
    if data[4:8] in _MP4_BOXES and not (data[4:8] == b"ftyp" and _is_avif(data)):
        return "video/mp4"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "video/webm"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "video/x-msvideo"
    if data[: _TS_PACKET_BYTES + 1 : _TS_PACKET_BYTES] == b"GG" and data[:3] != b"GIF":
        return "video/mp2t"
    return None


def find_kind(data: bytes) -> MediaKind:
    """The kind of an uploaded file. A container with video and audio is a video."""
    is_m4a = data[4:8] == b"ftyp" and data[8:12] in _M4A_BRANDS
    if find_container(data) and not is_m4a:
        return "video"
    return "audio" if find_audio(data) else "image"


def find_audio(data: bytes) -> str | None:
    """The media type of an audio file; MP4 and WebM count as audio. None for other files."""
    for magic, media_type in _AUDIO.items():
        if data.startswith(magic):
            return media_type
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "audio/wav"
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0:
        return "audio/mpeg" if data[1] & 0x06 else "audio/aac"
    container = find_container(data)
    return _AUDIO_OF_VIDEO.get(container) if container else None


def check_header(header: ImageHeader, limits: LimitSettings) -> None:
    """Check the size against the limits. Raises: ImageRefused."""
    short, long = sorted((header.width, header.height))
    if short < 1:
        raise ImageRefused("The image has no pixels: send at least 1 x 1.")
    if long > limits.max_image_side or header.width * header.height > limits.max_image_pixels:
        raise ImageRefused(
            f"The image is too large: send at most {limits.max_image_pixels} pixels and "
            f"{limits.max_image_side} on a side.",
            code="image_too_large",
        )
    if long > short * limits.max_image_aspect:
        raise ImageRefused(
            f"The image is too narrow: send an aspect ratio of at most {limits.max_image_aspect:g}:1."
        )


def _read_png(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR" or len(data) < 33:
        raise ValueError
    position = 33
    for _ in range(_MAX_PNG_CHUNKS - 1):
        name = data[position + 4 : position + 8]
        if name in (b"IEND", b""):
            width, height = unpack_from(">II", data, 16)
            return ImageHeader("image/png", width, height)
        if name == b"IHDR":  # decoders would use the last header, but the size is of the first one
            raise ImageRefused("The image has two headers: save it again.")
        position += 12 + int.from_bytes(data[position : position + 4], "big")
    raise ImageRefused(f"The PNG has more than {_MAX_PNG_CHUNKS} chunks; save it with fewer.")


def _read_jpeg(data: bytes) -> ImageHeader:
    """Read all segments up to the first scan, because decoders use the last frame header among them."""
    frame: ImageHeader | None = None
    position = 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        match = _JPEG_MARKER.match(data, position)
        if match is None:
            raise ValueError
        position = match.end()
        marker = data[position - 1]
        if marker in _JPEG_BARE:
            continue
        if marker == _JPEG_SCAN and frame is not None:
            _check_scans(data, position)
            return frame
        length = data[position] << 8 | data[position + 1]
        if length < 2 or marker in (_JPEG_END, _JPEG_SCAN):
            raise ValueError
        if marker in _JPEG_FRAMES:
            if frame is not None:
                raise ImageRefused("The image has two headers: save it again.")
            if length < 8:
                raise ValueError
            height, width = unpack_from(">HH", data, position + 3)
            frame = ImageHeader("image/jpeg", width, height)
        position += length
    raise ValueError


def _check_scans(data: bytes, position: int) -> None:
    """Count the scans of a JPEG, because each costs the decoder time. Raises: ImageRefused."""
    num_scans = 1
    for _ in range(_MAX_JPEG_SEGMENTS):
        position += int.from_bytes(data[position : position + 2], "big")
        match = _JPEG_MARKER_IN_SCAN.search(data, position)
        if match is None or data[match.end() - 1] == _JPEG_END:
            return  # the decoder handles a missing end; cameras append videos after the end
        position = match.end()
        num_scans += data[position - 1] == _JPEG_SCAN
        if num_scans > _MAX_JPEG_SCANS:
            raise ImageRefused(f"The JPEG has more than {_MAX_JPEG_SCANS} scans: save it again.")
    raise ValueError


def _read_webp(data: bytes) -> ImageHeader:
    if len(data) < 30:
        raise ValueError
    kind = data[12:16]
    if kind == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
    elif kind == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width = int.from_bytes(data[26:28], "little") & 0x3FFF
        height = int.from_bytes(data[28:30], "little") & 0x3FFF
    else:
        raise ValueError
    return ImageHeader("image/webp", width, height)


def _is_avif(data: bytes) -> bool:
    brands = data[8 : min(unpack_from(">I", data)[0], 256)]
    return any(brands[at : at + 4] in (b"avif", b"avis") for at in range(0, len(brands), 4))


def _read_avif(data: bytes) -> ImageHeader:
    """The size in the properties of the primary item."""
    start, end = _find_box(data, b"meta", 0, len(data))
    meta = (start + 4, end)
    pitm, _ = _find_box(data, b"pitm", *meta)
    primary = unpack_from(">I" if data[pitm] else ">H", data, pitm + 4)[0]
    properties = _find_box(data, b"iprp", *meta)
    found = list(_boxes(data, *_find_box(data, b"ipco", *properties)))
    for index in _properties_of(data, primary, _find_box(data, b"ipma", *properties)[0]):
        name, position, _ = found[index - 1]
        if index and name == b"ispe":
            width, height = unpack_from(">II", data, position + 4)
            return ImageHeader("image/avif", width, height)
    raise ValueError


def _properties_of(data: bytes, item: int, position: int) -> Iterator[int]:
    """The indices, from 1, of an item's properties. `position`: content of the `ipma` box, which associates them."""
    version, is_wide, count = data[position], data[position + 3] & 1, position + 4
    position += 8
    for _ in range(min(unpack_from(">I", data, count)[0], _MAX_AVIF_BOXES)):
        (found,) = unpack_from(">I" if version else ">H", data, position)
        position += 4 if version else 2
        num_properties = data[position]
        position += 1
        for _ in range(num_properties):
            index = (
                unpack_from(">H", data, position)[0] & 0x7FFF if is_wide else data[position] & 0x7F
            )
            position += 2 if is_wide else 1
            if found == item:
                yield index


def _find_box(data: bytes, name: bytes, start: int, end: int) -> tuple[int, int]:
    for found, position, its_end in _boxes(data, start, end):
        if found == name:
            return position, its_end
    raise ValueError


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Name, start and end of the content of each complete box. Raises: ValueError."""
    for _ in range(_MAX_AVIF_BOXES):
        if start + 8 > end:
            return
        size, position = unpack_from(">I", data, start)[0], start + 8
        if size == 1:
            size, position = unpack_from(">Q", data, start + 8)[0], start + 16
        its_end = start + size if size else end
        if not position <= its_end <= end:
            raise ValueError
        yield data[start + 4 : start + 8], position, its_end
        start = its_end
    raise ValueError


class ImageSource(Struct, frozen=True):
    """An image, video or audio of a request. `param`: its field in the request."""

    url: str
    param: str
    #: A stored image of the same tenant, instead of a URL.
    ref: ImageRef | None = None
    min_pixels: int = 0  #: minimum pixels after scaling; 0: the model's default
    max_pixels: int = 0  #: maximum pixels after scaling; 0: the model's default
    video: VideoOptions | None = None  #: options of a video; None: not a video
    if_video: VideoOptions | None = None  #: options if a stored file is a video
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
        self, sources: Sequence[ImageSource], reserve: Callable[[int], None]
    ) -> list[LoadedImage]:
        """Load images in order. `reserve` is called with a number of fetched bytes before they are stored.

        Stored images are not read. Raises: InvalidRequest, which names the refused image; errors of `reserve`. An
        error cancels the other loads.
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
            return await self._read_file(file, source)
        except ImageRefused as refused:
            raise InvalidRequest(refused.message, param=param, code=refused.code) from None

    async def _load(self, source: ImageSource, reserve: Callable[[int], None]) -> LoadedImage:
        try:
            if source.ref is not None:
                return LoadedImage(_as_asked(source.ref, source), None)
            if _is_data(source.url):
                from_url = partial(self._from_data_url, source.url, source)
                return await self._off_loop(from_url, len(source.url))
            file = await self._fetch(source, reserve)
            try:
                return await self._read_file(file, source)
            except BaseException:
                file.close()
                raise
        except ImageRefused as refused:
            raise InvalidRequest(refused.message, param=source.param, code=refused.code) from None

    async def _off_loop(self, work: Callable[[], LoadedImage], size: int) -> LoadedImage:
        """Run work in a thread if its input is large."""
        if size <= _INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _fetch(self, source: ImageSource, reserve: Callable[[int], None]) -> IO[bytes]:
        url = source.url
        if not url[:8].lower().startswith(("http://", "https://")):
            message = "Unsupported URL: send a data: URL in base64, an http(s) URL, or the id of a file for vision."
            raise ImageRefused(message, code="invalid_image_url")
        if self.fetcher is None:
            message = "Remote URLs are disabled: send a data: URL (the operator may set VLM_GATEWAY__REMOTE_IMAGES)."
            raise ImageRefused(message, code="invalid_image_url")
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
            message = f"The data: URL is not base64: send data:{example};base64,..."
            raise ImageRefused(message, code="invalid_image_url")
        self._check_bytes((len(url) - comma - 1) // 4 * 3 - 2, source.kind)
        if source.video is not None and head == f"data:{FRAMES_TYPE};base64":
            return self._from_frames(url[comma + 1 :].split(","), source.video)
        return self._check(decode_base64(url[comma + 1 :]), source)

    def _from_frames(self, encoded: Sequence[str], video: VideoOptions) -> LoadedImage:
        """A video of JPEG frames, which are all used. Raises: ImageRefused."""
        if video.num_frames is not None or video.start_s or video.end_s:
            raise ImageRefused(
                "A video of frames does not support num_frames, start_s or end_s: send only the frames to use."
            )
        if len(encoded) > self.limits.max_video_frames:
            most = self.limits.max_video_frames
            message = f"The video has {len(encoded)} frames: send at most {most}."
            raise ImageRefused(message, code="image_too_large")
        frames = [decode_base64(each) for each in encoded]
        headers = [read_header(frame) for frame in frames]
        first = headers[0]
        most = self.limits.max_frame_pixels
        if first.width * first.height > most:
            message = f"Frames of {first.width} x {first.height} are too large: send at most {most} pixels."
            raise ImageRefused(message, code="image_too_large")
        for number, header in enumerate(headers):
            check_header(header, self.limits)
            if header != first or header.media_type != "image/jpeg":
                raise ImageRefused(f"Frame {number}: send JPEG frames of equal size.")
        return _refer(msgspec.msgpack.encode(frames), FRAMES_TYPE, 0, 0, video)

    async def _read_file(self, file: IO[bytes], source: ImageSource) -> LoadedImage:
        """Raises: ImageRefused."""
        data = file.getvalue() if isinstance(file, io.BytesIO) else file
        _, num_bytes = _look_at(data)
        return await self._off_loop(partial(self._check, data, source), num_bytes)

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
    """Apply the kind and the options of the request to the reference of a stored image. Raises: ImageRefused."""
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
    """The first bytes and the length. Afterwards, a file is positioned at its beginning."""
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
    """Decode padded standard base64 with optional white space. Raises: ImageRefused."""
    try:
        if len(text) <= _SLICE_CHARS:
            return msgspec.convert(
                text, bytes
            )  # faster than binascii, and refuses redundant padding
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
