"""Decodes untrusted audio by PyAV, in the child process of videos: `AudioFile` reads all packets, then decodes them.

The length is that of the packets that are there, and of the samples that they have, not of headers.
"""

import io
from collections.abc import Iterator
from itertools import chain
from typing import Any

import av
import av.error

from engines.base import AudioInfo, InvalidImage
from engines.video_decoder import MAX_PACKETS, decode_stream

#: FFmpeg's name of a container by media type. It is not probed.
CONTAINERS = {
    "audio/wav": "wav", "audio/mpeg": "mp3", "audio/flac": "flac", "audio/ogg": "ogg", "audio/mp4": "mov",
    "audio/aac": "aac", "audio/webm": "matroska",
}  # fmt: skip
CODECS = (
    "aac", "mp3", "mp3float", "opus", "vorbis", "flac", "alac", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le",
    "pcm_f64le", "pcm_u8", "pcm_mulaw", "pcm_alaw", "pcm_s16be",
)  # fmt: skip
CODEC_NAMES = "PCM, MP3, AAC, Opus, Vorbis, FLAC and ALAC"
DAMAGED = (
    "The audio is damaged, or no audio; WAV, MP3, FLAC, Ogg, M4A, AAC and WebM are understood."
)
_OPTIONS = {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,wav,mp3,flac,ogg,aac",
    "codec_whitelist": ",".join(CODECS),
    "protocol_whitelist": "none",
    "max_streams": "16",
    "probesize": "1000000",
    "analyzeduration": "1000000",
}
_LEAST_RATE, _MOST_RATE = 1000, 384_000


class AudioFile:
    """The first audio stream of a file. Units: seconds."""

    def __init__(self, data: bytes, media_type: str, max_s: float, max_channels: int) -> None:
        """Raises: InvalidImage."""
        if media_type not in CONTAINERS:
            raise InvalidImage(DAMAGED)
        try:
            self._container: Any = av.open(
                io.BytesIO(data), format=CONTAINERS[media_type], options=_OPTIONS
            )
        except Exception:  # FFmpeg has a hundred errors
            raise InvalidImage(DAMAGED) from None
        self._stream: Any = next(iter(self._container.streams.audio), None)
        if self._stream is None:
            is_empty = not len(self._container.streams)
            raise InvalidImage(DAMAGED if is_empty else "The file has no audio.")
        context = self._stream.codec_context
        if context is None or context.codec.name not in CODECS:
            raise InvalidImage(f"The audio is of another codec; {CODEC_NAMES} are understood.")
        if not 1 <= context.channels <= max_channels:
            raise InvalidImage(
                f"The audio has {context.channels} channels: send at most {max_channels}."
            )
        if not _LEAST_RATE <= context.sample_rate <= _MOST_RATE:
            raise InvalidImage(
                f"The audio has {context.sample_rate} samples a second: send {_LEAST_RATE} to {_MOST_RATE}."
            )
        context.thread_count = 1
        self._max_s = max_s
        self.info = AudioInfo(self._scan(), context.channels, context.sample_rate)

    def _scan(self) -> float:
        """The length in seconds. Raises: InvalidImage."""
        start = end = None
        num_ticks = 0
        try:
            for number, packet in enumerate(self._container.demux(self._stream)):
                if number > MAX_PACKETS:
                    raise InvalidImage(f"The audio has more than {MAX_PACKETS} packets.")
                if not packet.size:
                    continue
                num_ticks += packet.duration or 0
                if packet.pts is not None:
                    start = packet.pts if start is None else min(start, packet.pts)
                    end = max(end or 0, packet.pts + (packet.duration or 0))
        except av.error.FFmpegError:  # the file is cut off: the packets before the cut count
            pass
        if start is not None and end is not None:
            num_ticks = max(num_ticks, end - start)
        length_s = num_ticks * float(self._stream.time_base or 0)
        if length_s > self._max_s:
            raise self._too_long(length_s)
        return length_s

    def samples(self, rate: int) -> Iterator[bytes]:
        """One channel at this many samples a second, as float32. Raises: InvalidImage."""
        left = int(self._max_s * rate)
        resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
        is_empty = True
        try:
            self._container.seek(0)
        except Exception:
            raise InvalidImage(DAMAGED) from None
        frames = decode_stream(self._container, self._stream, DAMAGED)
        for frame in chain(frames, (None,)):
            try:
                pieces = resampler.resample(frame)
            except Exception:  # its format changes within the stream
                raise InvalidImage(DAMAGED) from None
            for piece in pieces:
                left -= piece.samples
                if left < 0:
                    raise self._too_long(self._max_s + 1)
                is_empty = is_empty and not piece.samples
                yield bytes(piece.planes[0])[: 4 * piece.samples]
        if is_empty:
            raise InvalidImage("The audio has no samples that can be decoded.")

    def _too_long(self, length_s: float) -> InvalidImage:
        return InvalidImage(f"The audio is {length_s:.0f} s long: send at most {self._max_s:g} s.")
