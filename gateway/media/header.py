"""Formats and sizes of images (PNG, JPEG, WebP, GIF, AVIF) from their first bytes; containers of video and audio.

Cheap enough for the event loop and immune to decompression bombs, as pixel data is never decoded. Workers decode the
images, and may still refuse them. Formats are recognized by content, never by the client's media type.

Source: PNG specification section 5.2 and 11.2.2; ITU T.81 annex B; RFC 9649 section 2; GIF89a section 18;
ISO/IEC 14496-12 section 4 (boxes) and 23008-12 sections 8.11.4, 9.3 and 6.5.3 (pitm, iprp, ispe).
"""

import re
from collections.abc import Iterator
from struct import error as StructError
from struct import unpack_from

from msgspec import Struct

from shared.media import MEDIA
from shared.protocol import MediaKind
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
_JPEG_MARKER_IN_SCAN = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd7]")  # in data, 0 follows a 255
_MAX_JPEG_SEGMENTS = 4096
_MAX_JPEG_SCANS = 100  #: encoders write about ten
_MAX_AVIF_BOXES = 1000  #: within one box
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length


class ImageRefused(Exception):
    """An image, video or audio is unusable; the message is for the client."""

    def __init__(self, message: str, code: str = "invalid_image") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class ImageHeader(Struct, frozen=True):
    """Properties of an image file."""

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
    raise ImageRefused(
        f"Unsupported image: send {MEDIA['image'].formats}.", code="unsupported_image"
    )


def find_container(data: bytes) -> str | None:
    """The media type of a video file; None for other files. Workers read the rest."""
    if data[4:8] in _MP4_BOXES and not (data[4:8] == b"ftyp" and _is_avif(data)):
        return "video/mp4"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "video/webm"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "video/x-msvideo"
    if data[:1] == b"G" and data[_TS_PACKET_BYTES : _TS_PACKET_BYTES + 1] == b"G":
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
        if name == b"IHDR":  # decoders use the last one, and we read the first
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
    """Count the scans of a JPEG, because each costs the decoder time. Raises: ImageRefused.

    Data after the end of the image is ignored: cameras put films there.
    """
    num_scans = 1
    for _ in range(_MAX_JPEG_SEGMENTS):
        position += int.from_bytes(data[position : position + 2], "big")
        match = _JPEG_MARKER_IN_SCAN.search(data, position)
        if match is None or data[match.end() - 1] == _JPEG_END:
            return  # the end is missing: left to the decoder
        position = match.end()
        num_scans += data[position - 1] == _JPEG_SCAN
        if num_scans > _MAX_JPEG_SCANS:
            raise ImageRefused(
                f"The JPEG has more than {_MAX_JPEG_SCANS} scans; save it with fewer."
            )
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
    """The indices, from 1, of an item's properties, from the associations at a position."""
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
