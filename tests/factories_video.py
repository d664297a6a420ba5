"""Small video files, created with PyAV."""

import io
import math
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
from PIL import Image

av: Any = pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")

SIZE = (64, 48)


def picture(number: int, size: tuple[int, int] = SIZE) -> Image.Image:
    """Returns frame `number`: a shade for its number, and a brighter corner at the top left."""
    image = Image.new("RGB", size, (number * 2 % 200,) * 3)
    image.paste((255, 255, 0), (0, 0, size[0] // 4, size[1] // 4))
    return image


def number_of(image: Image.Image) -> float:
    """Returns the number of a frame below 100, by the shade of its center."""
    pixel: Any = image.getpixel((image.width // 2, image.height // 2))
    return pixel[1] / 2


def make_clip(
    codec: str = "libx264",
    form: str = "mp4",
    num_frames: int = 50,
    *,
    fps: Fraction | int = 25,
    size: tuple[int, int] = SIZE,
    times: Callable[[int], int] = int,
    gop: int = 12,
    is_still: bool = False,
    **options: str,
) -> bytes:
    """Returns a clip of `picture`s, or of the first one. `times(i)` is the time of frame i, in frames."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=fps, options=options)
        stream.width, stream.height = size
        stream.pix_fmt, stream.gop_size, stream.bit_rate = "yuv420p", gop, 2_000_000
        for number in range(num_frames):
            if not (is_still and number):
                frame = av.VideoFrame.from_image(picture(number, size))
            frame.pts = times(number)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def slower_later(number: int) -> int:
    """Returns frame times of a video with variable rate: from frame 25 on, each frame lasts five times as long."""
    return number if number < 25 else 25 + 5 * (number - 25)


@cache
def clip(name: str) -> bytes:
    """Returns the bytes of a clip by its name."""
    return CLIPS[name][0]()


def _boxes(data: bytes, name: bytes) -> Iterator[int]:
    """Yields the start of the content of each box with this name in an MP4 file."""
    place = data.find(name)
    while place >= 0:
        yield place + 4
        place = data.find(name, place + 4)


def rotated(data: bytes, degrees: float = 90, unit: int = 1 << 16, y: int = 1) -> bytes:
    """Returns the MP4 file with metadata for a clockwise rotation; y = -1: of frames that are flipped vertically."""
    out = bytearray(data)
    for place in _boxes(data, b"tkhd"):
        cos, sin = (int(unit * f(math.radians(degrees))) for f in (math.cos, math.sin))
        matrix = (cos, sin, 0, -sin * y, cos * y, 0, 0, 0, 1 << 30)
        out[place + 40 : place + 76] = struct.pack(">9i", *matrix)
    return bytes(out)


def claiming(data: bytes, seconds: int) -> bytes:
    """Returns the MP4 file with headers that state this duration."""
    out = bytearray(data)
    for name in (b"mvhd", b"mdhd"):
        for place in _boxes(data, name):
            (scale,) = struct.unpack_from(">I", data, place + 12)
            struct.pack_into(">I", out, place + 16, min(2**32 - 1, scale * seconds))
    return bytes(out)


def spoilt(data: bytes) -> bytes:
    """Returns the file with every 97th byte of its second half inverted."""
    out = bytearray(data)
    for place in range(len(data) // 2, len(data), 97):
        out[place] ^= 0xFF
    return bytes(out)


def with_cover() -> bytes:
    """Returns an MP4 file with sound and a cover picture."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream, cover = container.add_stream("aac", rate=48000), container.add_stream("mjpeg")
        cover.width, cover.height, cover.pix_fmt = *SIZE, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        frame = av.AudioFrame(format="fltp", layout="mono", samples=1024)
        frame.rate = 48000
        frame.planes[0].update(bytes(frame.planes[0].buffer_size))
        container.mux(stream.encode(frame))
        container.mux(cover.encode(av.VideoFrame.from_image(picture(0))))
        container.mux([*stream.encode(None), *cover.encode(None)])
    return file.getvalue()


def faststart(**options: Any) -> bytes:
    """Returns a clip with its index at the front."""
    with NamedTemporaryFile(suffix=".mp4") as file:
        _copy(make_clip(**options), file.name)
        return Path(file.name).read_bytes()


def _copy(data: bytes, path: str) -> None:
    with (
        av.open(io.BytesIO(data)) as source,
        av.open(path, "w", format="mp4", options={"movflags": "faststart"}) as container,
    ):
        stream = container.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                container.mux(packet)


#: Clips by name: a function that creates one, its media type, and its defect or "".
CLIPS: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "mp4": (make_clip, "video/mp4", ""),
    "hevc": (lambda: make_clip("libx265", **{"x265-params": "log-level=none"}), "video/mp4", ""),
    "av1": (lambda: make_clip("libsvtav1", size=(128, 96)), "video/mp4", ""),
    "vp9": (lambda: make_clip("libvpx-vp9", "webm"), "video/webm", ""),
    "vp8": (lambda: make_clip("libvpx", "webm"), "video/webm", ""),
    "mpeg4": (lambda: make_clip("mpeg4", "avi"), "video/x-msvideo", ""),
    "mpegts": (lambda: make_clip(form="mpegts"), "video/mp2t", ""),
    "variable": (lambda: make_clip(times=slower_later), "video/mp4", ""),
    "rotated": (lambda: rotated(make_clip()), "video/mp4", ""),
    "large": (lambda: make_clip(num_frames=200, size=(448, 336)), "video/mp4", ""),
    "one frame": (lambda: make_clip(num_frames=1), "video/mp4", ""),
    "claims 10 hours": (lambda: claiming(make_clip(), 36_000), "video/mp4", ""),
    "spoilt": (lambda: spoilt(faststart()), "video/mp4", ""),
    "cut behind its index": (lambda: faststart()[: len(faststart()) * 2 // 3], "video/mp4", ""),
    "cut before its index": (lambda: make_clip()[:2000], "video/mp4", "damaged, or is not"),
    "playlist": (lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "video/mp4", "damaged, or is not"),
    "concat": (lambda: b"ffconcat version 1.0\nfile /etc/passwd\n", "video/mp4", "damaged, or is not"),
    "nonsense": (lambda: b"\0\0\0\x18ftypisom" + b"\xff" * 4096, "video/mp4", "damaged, or is not"),
    "sound": (with_cover, "video/mp4", "has only sound: send it as audio"),
    "another codec": (lambda: make_clip("mpeg1video", "mpegts"), "video/mp2t", "codec of the video is not supported"),
    "large frames": (lambda: make_clip(size=(4112, 2304), num_frames=1), "video/mp4", "Frames of 4112 x 2304"),
    "long": (lambda: make_clip(num_frames=3, times=lambda i: i * 50_000), "video/mp4", "send at most"),
}  # fmt: skip
