"""Decodes untrusted videos with PyAV in a sandboxed child process.

`VideoFile` reads all packets, then decodes the chosen frames. Lengths and counts are computed from the packets, not
read from headers. FFmpeg opens only the listed containers and codecs, and no other file or protocol.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import IO, Any

import av
import av.error
import av.stream
import msgspec
from av.sidedata.sidedata import Type
from PIL import Image

from engines.base import FrameLimits, InvalidImage, VideoInfo
from engines.image_decoder import decode_image
from shared.protocol import FRAMES_TYPE

#: FFmpeg's container names by media type. The container is not probed.
CONTAINERS = {
    "video/mp4": "mov", "video/webm": "matroska", "video/x-msvideo": "avi", "video/mp2t": "mpegts",
}  # fmt: skip
CODECS = ("h264", "hevc", "libdav1d", "vp8", "vp9", "mpeg4", "mjpeg")
CONTAINER_NAMES = "MP4, WebM, AVI and MPEG-TS"
CODEC_NAMES = "H.264, HEVC, AV1, VP8, VP9, MPEG-4 and Motion JPEG"
DAMAGED = f"The file is damaged, or is not a video; {CONTAINER_NAMES} are supported."
OPTIONS = {
    "protocol_whitelist": "none",
    "max_streams": "16",
    "probesize": "1000000",
    "analyzeduration": "1000000",
}
_OWN_OPTIONS = OPTIONS | {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts",
    "codec_whitelist": ",".join(CODECS),
}
MAX_PACKETS = 500_000
_PADDING_PIXELS = 256 * 256  #: FFmpeg counts the padding of its buffers as pixels
_MAX_ERRORS = 100  #: damaged packets that are skipped


class VideoFile:
    """The part of a video file between two times, described by `info`. Units: seconds."""

    def __init__(
        self,
        file: IO[bytes],
        media_type: str,
        limits: FrameLimits,
        max_s: float,
        start_s: float = 0.0,
        end_s: float = 0.0,
    ) -> None:
        """`end_s` 0: the end of the file. Raises: InvalidImage."""
        self._file = file
        self._media_type = media_type
        self._limits = limits
        self._can_seek = True
        self._open()
        self._base = float(self._stream.time_base or 0) or 1e-6
        self._keys: list[int] = []
        pts, length_s = self._scan()
        check_length("video", length_s, max_s)
        if start_s and start_s >= length_s:
            raise InvalidImage("The video ends before start_s: send a smaller start_s.", "start_s")
        self._pts = self._cut(pts, start_s, min(end_s, length_s))
        begin_s = (self._pts[0] - pts[0]) * self._base
        self.info = self._describe(min(end_s or length_s, length_s) - begin_s)

    def _open(self) -> None:
        """Open the file at its beginning. Raises: InvalidImage."""
        form = CONTAINERS[self._media_type]
        self._container = open_container(self._file, form, _OWN_OPTIONS, DAMAGED)
        is_cover = av.stream.Disposition.attached_pic
        streams = self._container.streams.video
        found = next((each for each in streams if not each.disposition & is_cover), None)
        if found is None:
            is_empty = not len(self._container.streams)
            raise InvalidImage(
                DAMAGED if is_empty else "The file has only sound: send it as audio."
            )
        self._stream: Any = found
        context = found.codec_context
        if context is None or context.codec.name not in CODECS:
            raise InvalidImage(f"The codec of the video is not supported: send {CODEC_NAMES}.")
        self._limits.check(context.width, context.height)
        context.options = {"max_pixels": str(2 * self._limits.max_pixels + _PADDING_PIXELS)}
        context.thread_count = 1

    def _scan(self) -> tuple[list[int], float]:
        """The times of all frames, in order, and the length in seconds. Raises: InvalidImage."""
        pts: list[int] = []
        end = 0
        for packet in read_packets(self._container, self._stream, "video"):
            if packet.pts is not None:
                pts.append(packet.pts)
                end = max(end, packet.pts + (packet.duration or 0))
                if packet.is_keyframe:
                    self._keys.append(packet.pts)
        if not pts:
            raise InvalidImage("The video has no frames that can be read.")
        pts.sort()
        self._keys = sorted(self._keys) or pts[:1]
        if len(pts) > 1 and end <= pts[-1]:  # the last frame has no duration
            end = pts[-1] + (pts[-1] - pts[0]) // (len(pts) - 1)
        return pts, max((end - pts[0]) * self._base, 0.0)

    def _cut(self, pts: list[int], start_s: float, end_s: float) -> list[int]:
        first = pts[0] + round(start_s / self._base)
        last = pts[0] + round(end_s / self._base) if end_s else pts[-1] + 1
        kept = [each for each in pts if each < last] or pts[:1]
        # the frame that is shown at the start
        return kept[max(0, bisect_right(kept, first) - 1) :]

    def _describe(self, length_s: float) -> VideoInfo:
        frame = next(self._decode_from(self._pts[0]), None)
        if frame is None:
            raise InvalidImage("No frame of the video can be decoded.")
        self._limits.check(frame.width, frame.height)
        # Encoders round the rotation matrix. A matrix of zeros means no rotation.
        turns = round(frame.rotation / 90) if abs(frame.rotation) <= 360 else 0
        self._rotation = 90 * turns % 360
        matrix = frame.side_data.get(Type.DISPLAYMATRIX)
        a, b, _, c, d, *_ = struct.unpack("9i", bytes(matrix)) if matrix else (1, 0, 0, 0, 1)
        self._is_mirrored = a * d < b * c
        width, height = frame.width, frame.height
        if self._rotation % 180:
            width, height = height, width
        if length_s <= 0:
            length_s = len(self._pts) / float(self._stream.average_rate or 25)
        return VideoInfo(width, height, len(self._pts), length_s)

    def frames(self, times: Sequence[float]) -> Iterator[Image.Image]:
        """The frames that are shown at ascending times, upright, in RGB. Raises: InvalidImage."""
        start = self._pts[0]
        # Tolerate half a tick: frame times are not multiples of the time base.
        wanted = [
            self._pts[max(0, bisect_right(self._pts, start + t / self._base + 0.5) - 1)]
            for t in times
        ]
        size = self._size(len(wanted))
        source: Iterator[Any] = iter(())
        at: int | None = None
        last: Any = None
        for target in wanted:
            if at is None or (self._can_seek and self._key(target) > at):
                source, at = self._decode_from(self._key(target)), None
            while at is None or at < target:
                frame = next(source, None)
                if frame is None:
                    break
                if frame.pts is not None:
                    at, last = frame.pts, frame
            if last is None:
                raise InvalidImage("A frame of the video cannot be decoded.")
            yield self._to_rgb(last, size)

    def _key(self, pts: int) -> int:
        return self._keys[max(0, bisect_right(self._keys, pts) - 1)]

    def _decode_from(self, pts: int) -> Iterator[Any]:
        """Decode from the key frame at `pts`, or from an earlier frame. Raises: InvalidImage."""
        if self._can_seek:
            try:
                self._container.seek(pts, stream=self._stream, backward=True, any_frame=False)
                self._stream.codec_context.flush_buffers()
            except Exception:
                raise InvalidImage(DAMAGED) from None
            frames = decode_stream(self._container, self._stream, DAMAGED)
            first = next(frames, None)
            if first is not None and first.pts is not None and first.pts <= pts:
                yield first
                yield from frames
                return
            self._can_seek = False  # its index is imprecise, as in MPEG-TS
        self._open()
        yield from decode_stream(self._container, self._stream, DAMAGED)

    def _size(self, num_frames: int) -> tuple[int, int]:
        """Width and height of decoded frames, before they are rotated."""
        width, height = self._limits.scale(self.info.width, self.info.height, num_frames)
        return (height, width) if self._rotation % 180 else (width, height)

    def _to_rgb(self, frame: Any, size: tuple[int, int]) -> Image.Image:
        self._limits.check(frame.width, frame.height)  # the size can change within a stream
        rgb = frame.reformat(*size, "rgb24").planes[0]
        image = Image.frombuffer("RGB", size, rgb, "raw", "RGB", rgb.line_size, 1)
        if self._is_mirrored:
            image = image.transpose(Image.Transpose.FLIP_TOP_BOTTOM)
        return image.rotate(self._rotation, expand=True) if self._rotation else image


def open_container(file: IO[bytes], form: str, options: dict[str, str], damaged: str) -> Any:
    """Open a file at its beginning. Raises: InvalidImage with the message `damaged`."""
    file.seek(0)
    try:
        return av.open(file, format=form, options=options)
    except Exception:  # FFmpeg raises many kinds of errors
        raise InvalidImage(damaged) from None


def read_packets(container: Any, stream: Any, kind: str) -> Iterator[Any]:
    """The packets of a stream, up to the end of a truncated file. Raises: InvalidImage."""
    with suppress(av.error.FFmpegError):
        for number, packet in enumerate(container.demux(stream)):
            if number > MAX_PACKETS:
                raise InvalidImage(f"Too many packets: send a {kind} of at most {MAX_PACKETS}.")
            if packet.size:
                yield packet


def decode_stream(container: Any, stream: Any, damaged: str) -> Iterator[Any]:
    """The next frames of a stream; damaged packets are skipped. Raises: InvalidImage with the message `damaged`."""
    num_errors = 0
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
            if packet is None:
                return
            decoded = packet.decode()
        except Exception:  # FFmpeg raises many kinds of errors
            num_errors += 1
            if num_errors > _MAX_ERRORS:
                raise InvalidImage(damaged) from None
            continue
        yield from decoded


def check_length(kind: str, length_s: float, max_s: float, param: str | None = None) -> None:
    """Raises: InvalidImage."""
    if length_s > max_s:
        raise InvalidImage(f"The {kind} is {length_s:.6g} s long: send at most {max_s:g} s.", param)


class FrameFile:
    """A video sent as JPEG frames, with the interface of `VideoFile`. `info.fps` is the frame rate."""

    def __init__(self, data: bytes, limits: FrameLimits, max_s: float, fps: float) -> None:
        """Raises: InvalidImage."""
        try:
            self._frames = msgspec.msgpack.decode(data, type=list[bytes])
        except msgspec.MsgspecError:
            raise InvalidImage(DAMAGED) from None
        if not self._frames:
            raise InvalidImage("The video has no frames.")
        length_s = len(self._frames) / fps
        check_length("video", length_s, max_s, "fps")
        self._limits = limits
        self._fps = fps
        self._size = decode_image(self._frames[0]).size
        limits.check(*self._size)
        self.info = VideoInfo(*self._size, len(self._frames), length_s, is_sampled=True)

    def frames(self, times: Sequence[float]) -> Iterator[Image.Image]:
        size = self._limits.scale(*self._size, len(times))
        for time in times:
            index = round(time * self._fps)
            image = decode_image(self._frames[min(index, len(self._frames) - 1)])
            if image.size != self._size:
                raise InvalidImage(f"Frame {index} and frame 0 differ in size: send equal sizes.")
            yield image.resize(size)


def open_video(
    file: IO[bytes],
    media_type: str,
    limits: FrameLimits,
    max_s: float,
    start_s: float,
    end_s: float,
    fps: float,
) -> VideoFile | FrameFile:
    """Open a video file, or a list of JPEG frames, by its media type. Raises: InvalidImage."""
    if media_type == FRAMES_TYPE:
        return FrameFile(file.read(), limits, max_s, fps)
    if media_type not in CONTAINERS:
        raise InvalidImage(f"The media type of the video is not supported: send {CONTAINER_NAMES}.")
    return VideoFile(file, media_type, limits, max_s, start_s, end_s)
