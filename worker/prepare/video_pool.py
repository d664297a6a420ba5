"""Decodes videos and audio in sandboxed child processes, which send a file's properties, then frames or samples."""

import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from io import BytesIO
from shutil import copyfileobj
from tempfile import TemporaryFile
from threading import Lock
from typing import IO, Any

import msgspec
import psutil
from PIL import Image

from engines.base import AudioInfo, FrameLimits, InvalidImage, OpenAudio, OpenVideo, VideoInfo
from engines.child_process import receive, receive_message, send_message
from shared.protocol import ImageRef, VideoOptions
from shared.settings.limits import LimitSettings
from worker.prepare.decoder_pool import Child, ChildPool

CANNOT_DECODE = "The video cannot be decoded."
TOO_LONG = "The video takes too long to decode: send a shorter or smaller one."
CANNOT_DECODE_AUDIO = "The audio cannot be decoded."
AUDIO_TOO_LONG = "The audio takes too long to decode: send a shorter file."
VALUE, REFUSAL = b"=", b"!"  #: status of an answer
SIZE = struct.Struct(">II")  #: width and height of a frame, whose pixels follow
_BASE_BYTES = 1024 * 1024 * 1024  #: address space; FFmpeg maps much more than it uses
PIECE_BYTES = 256 * 1024  #: minimum size of a message of samples
_MAX_JSON_BYTES = 64 * 1024


class Head(msgspec.Struct, frozen=True, tag="video"):
    """Arguments of `engines.video_decoder.open_video`, except the file."""

    media_type: str
    limits: FrameLimits
    max_s: float
    start_s: float
    end_s: float
    fps: float


class AudioHead(msgspec.Struct, frozen=True, tag="audio"):
    """Arguments of `engines.audio_decoder.AudioFile`, except the file."""

    media_type: str
    max_s: float
    max_channels: int
    start_s: float
    end_s: float
    max_segment_s: float


class Refusal(msgspec.Struct, frozen=True):
    """An `InvalidImage` that the child reports."""

    message: str
    param: str | None


class VideoPool(ChildPool):
    """Decodes videos and audio."""

    module = "worker.prepare.video_child"  # not imported here, because it loads PyAV
    max_files = 50
    cpu_s = 0.0  #: CPU time of the children for their files

    def __init__(self, num_processes: int, limits: LimitSettings) -> None:
        super().__init__(
            num_processes,
            _BASE_BYTES + 2 * max(limits.max_video_bytes, limits.max_audio_bytes),
            limits.max_video_cpu_s,
        )
        self._limits = limits
        self._count_lock = Lock()
        self.num_processes = num_processes

    @contextmanager
    def borrow(self) -> Iterator[Child]:
        with super().borrow() as child:
            before_s = _cpu_s(child)
            try:
                yield child
            finally:
                used_s = _cpu_s(child) - before_s
                with self._count_lock:
                    self.cpu_s += max(0.0, used_s)

    @contextmanager
    def open(self, file: IO[bytes], ref: ImageRef) -> Iterator["DecodedVideo"]:
        """Open a video within the block. Raises: InvalidImage; OSError if no child can be started."""
        options = ref.video or VideoOptions()
        limits = FrameLimits(
            self._limits.max_frame_pixels,
            self._limits.max_video_pixels,
            ref.min_pixels,
            ref.max_pixels,
        )
        head = Head(
            ref.media_type,
            limits,
            self._limits.max_video_s,
            options.start_s,
            options.end_s,
            options.fps or 1.0,
        )
        with self.borrow() as child:
            with child.talking(CANNOT_DECODE, TOO_LONG):
                info, until = self._ask(child, head, file, VideoInfo)
            video = DecodedVideo(child, info, options, self._limits.max_video_frames, limits, until)
            try:
                yield video
            finally:
                if video.indices is None and not child.is_lost:
                    video.frames(())

    @contextmanager
    def open_audio(
        self, file: IO[bytes], ref: ImageRef, max_segment_s: float = 0.0
    ) -> Iterator["DecodedAudio"]:
        """Open audio within the block. Raises: InvalidImage; OSError if no child can be started.

        `max_segment_s`: maximum length of the segments in `info`; 0: no segments.
        """
        limits = self._limits
        head = AudioHead(
            ref.media_type,
            limits.max_audio_s,
            limits.max_audio_channels,
            ref.start_s,
            ref.end_s,
            max_segment_s,
        )
        with self.borrow() as child:
            with child.talking(CANNOT_DECODE_AUDIO, AUDIO_TOO_LONG):
                info, until = self._ask(child, head, file, AudioInfo)
            audio = DecodedAudio(child, info, limits.max_audio_s, until)
            try:
                yield audio
            finally:
                if not audio.is_read and not child.is_lost:
                    audio.samples(0)

    def _ask(
        self, child: Child, head: Head | AudioHead, file: IO[bytes], kind: type[Any]
    ) -> tuple[Any, float]:
        """Send a file. Returns its info, and the `time.monotonic` at which decoding must end. Raises: as `_receive`."""
        until = time.monotonic() + self.timeout_s
        child.socket.settimeout(self.timeout_s)
        send_message(child.socket, msgspec.json.encode(head))
        file.seek(0)
        is_on_disk = not isinstance(file, BytesIO)
        with nullcontext(file) if is_on_disk else TemporaryFile() as stored:
            if not is_on_disk:
                copyfileobj(file, stored)
                stored.seek(0)
            socket.send_fds(child.socket, [b"="], [stored.fileno()])
        return msgspec.json.decode(_receive(child, until, _MAX_JSON_BYTES), type=kind), until


@dataclass(eq=False)
class DecodedAudio(OpenAudio):
    """Audio in a child process."""

    _child: Child
    info: AudioInfo
    _max_s: float
    _until: float
    is_read: bool = False

    def samples(self, rate: int) -> bytes:
        """See `OpenAudio.samples`; called once. A rate of 0 decodes no samples."""
        assert not self.is_read
        self.is_read = True
        most = 4 * int(self._max_s * rate)
        samples = bytearray()
        with self._child.talking(CANNOT_DECODE_AUDIO, AUDIO_TOO_LONG):
            send_message(self._child.socket, msgspec.json.encode(rate))
            while piece := _receive(self._child, self._until, most - len(samples)):
                samples += piece
                if len(samples) > most:
                    raise EOFError
        return bytes(samples)


@dataclass(eq=False)
class DecodedVideo(OpenVideo):
    """A video in a child process. `frames` sets `indices` and `size` to those of the decoded frames."""

    _child: Child
    info: VideoInfo
    options: VideoOptions
    max_frames: int
    _limits: FrameLimits
    _until: float
    indices: tuple[int, ...] | None = None
    size: tuple[int, int] = (0, 0)

    def frames(self, indices: Sequence[int]) -> list[Image.Image]:
        """See `OpenVideo.frames`; called once."""
        assert self.indices is None
        self.indices = tuple(indices)
        wanted = sorted({*indices})
        times = [index / self.info.fps for index in wanted]
        self.size = self._limits.scale(self.info.width, self.info.height, len(wanted))
        num_bytes = 3 * self.size[0] * self.size[1]
        images = {}
        with self._child.talking(CANNOT_DECODE, TOO_LONG):
            send_message(self._child.socket, msgspec.json.encode(times))
            for index in wanted:
                head = _receive(self._child, self._until, SIZE.size)
                pixels = receive_message(self._child.socket, self._until, num_bytes)
                if (head, len(pixels)) != (SIZE.pack(*self.size), num_bytes):
                    raise EOFError
                images[index] = Image.frombuffer("RGB", self.size, pixels, "raw", "RGB", 0, 1)
        return [images[index] for index in indices]


def _cpu_s(child: Child) -> float:
    """CPU time of a child; 0 after its end."""
    with suppress(psutil.Error):
        return sum(psutil.Process(child.process.pid).cpu_times()[:2])
    return 0.0


def _receive(child: Child, until: float, max_bytes: int) -> bytearray:
    """Receive one answer of the child. Raises: InvalidImage; EOFError, OSError."""
    status = receive(child.socket, len(VALUE), until)
    data = receive_message(child.socket, until, max(max_bytes, _MAX_JSON_BYTES))
    if status == REFUSAL:
        refusal = msgspec.json.decode(data, type=Refusal)
        raise InvalidImage(refusal.message, refusal.param)
    return data
