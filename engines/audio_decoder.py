"""Decodes untrusted audio with PyAV, in the sandboxed child process that also decodes videos.

The length is computed from the packets and samples of the file, not read from its headers.
"""

import math
from collections.abc import Iterator
from itertools import chain
from typing import IO, Any

import av

from engines.base import AudioInfo, InvalidImage
from engines.video_decoder import OPTIONS, check_length, decode_stream, open_container, read_packets

#: FFmpeg's container names by media type. The container is not probed.
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
    "The audio is damaged or in an unsupported format: send WAV, MP3, FLAC, Ogg, M4A, AAC or WebM."
)
_OPTIONS = OPTIONS | {
    "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,wav,mp3,flac,ogg,aac",
    "codec_whitelist": ",".join(CODECS),
}
_LEAST_RATE, _MOST_RATE = 1000, 384_000
_PREROLL_S = 1.0  #: decoding starts this much before a part, because its first samples depend on earlier packets
_LOUDNESS_RATE = 4000
_STEP_SAMPLES = 400  #: samples of a step of 0.1 s at `_LOUDNESS_RATE`
_STEPS_PER_S = _LOUDNESS_RATE / _STEP_SAMPLES


class AudioFile:
    """The first audio stream of a file, or a part of it. Units: seconds."""

    def __init__(
        self,
        file: IO[bytes],
        media_type: str,
        max_s: float,
        max_channels: int,
        start_s: float = 0.0,
        end_s: float = 0.0,
        max_segment_s: float = 0.0,
    ) -> None:
        """`end_s` 0: the whole file. `max_segment_s`: find segments of at most this length. Raises: InvalidImage."""
        if media_type not in CONTAINERS:
            raise InvalidImage(DAMAGED)
        self._container = open_container(file, CONTAINERS[media_type], _OPTIONS, DAMAGED)
        self._stream: Any = next(iter(self._container.streams.audio), None)
        if self._stream is None:
            is_empty = not len(self._container.streams)
            raise InvalidImage(DAMAGED if is_empty else "The file has no audio.")
        context = self._stream.codec_context
        if context is None or context.codec.name not in CODECS:
            raise InvalidImage(f"The codec of the audio is not supported: send {CODEC_NAMES}.")
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
        self._start_s, self._end_s = start_s, end_s or max_s + 1.0
        self._first_s = float((self._stream.start_time or 0) * (self._stream.time_base or 0))
        length_s = end_s - start_s if end_s else self._scan()
        ends = self._find_segments(length_s, max_segment_s) if max_segment_s else ()
        self.info = AudioInfo(length_s, ends)

    def _scan(self) -> float:
        """The length in seconds. Raises: InvalidImage."""
        start = end = None
        num_ticks = 0
        for packet in read_packets(self._container, self._stream, "audio"):
            num_ticks += packet.duration or 0
            if packet.pts is not None:
                start = packet.pts if start is None else min(start, packet.pts)
                end = max(end or 0, packet.pts + (packet.duration or 0))
        if start is not None and end is not None:
            num_ticks = max(num_ticks, end - start)
        length_s = num_ticks * float(self._stream.time_base or 0)
        check_length("audio", length_s, self._max_s)
        return length_s

    def _find_segments(self, length_s: float, longest_s: float) -> tuple[float, ...]:
        """End times of segments. Each ends at the quietest 0.4 s within the last third of `longest_s`."""
        if length_s <= longest_s:
            return (length_s,)
        loudness, end_s = list[float](), 0.0  # the loudness of each step
        for at_s, piece in self._pieces(_LOUDNESS_RATE, 0.0):
            samples = memoryview(piece).cast("f")
            end_s = max(end_s, at_s + len(samples) / _LOUDNESS_RATE)
            check_length("audio", end_s, self._max_s)
            first = max(0, int(at_s * _STEPS_PER_S))
            for step, start in enumerate(range(0, len(samples), _STEP_SAMPLES), first):
                loudness += [0.0] * (step + 1 - len(loudness))
                loudness[step] += sum(map(abs, samples[start : start + _STEP_SAMPLES]))
        longest, start, ends = int(longest_s * _STEPS_PER_S), 0, []
        while end_s * _STEPS_PER_S - start > longest:
            # The last segment has at least a third of the longest length.
            last = min(start + longest, int(end_s * _STEPS_PER_S) - longest // 3)
            steps = range(last, start + longest * 2 // 3 - 1, -1)
            start = min(steps, key=lambda step: sum(loudness[step - 2 : step + 2]))
            ends.append(start / _STEPS_PER_S)
        return (*ends, end_s)

    def samples(self, rate: int) -> Iterator[bytes]:
        """Decode one channel as float32, at `rate` samples per second. Raises: InvalidImage."""
        for from_s in (self._start_s - _PREROLL_S, 0.0):
            pieces = self._pieces(rate, from_s)
            head = next(pieces, (math.inf, b""))
            if from_s <= 0 or head[0] <= self._start_s:
                break  # otherwise the seek landed after the start: decode from the file's beginning
        part_s = min(self._end_s - self._start_s, self._max_s)
        left, is_part = int(part_s * rate), part_s < self._max_s
        is_empty = True
        for at_s, piece in chain((head,), pieces):
            if at_s >= self._end_s:
                break
            start, end = (round((s - at_s) * rate) for s in (self._start_s, self._end_s))
            kept = piece[4 * max(0, start) : 4 * max(0, end)]
            if is_part:  # timestamps of a damaged file can overlap
                kept = kept[: 4 * left]
            left -= len(kept) // 4
            if left < 0:
                check_length("audio", self._max_s + 1, self._max_s)
            is_empty = is_empty and not kept
            yield kept
        if is_empty:
            raise InvalidImage("The audio has no samples that can be decoded.")

    def _pieces(self, rate: int, from_s: float) -> Iterator[tuple[float, bytes]]:
        """Times and samples of pieces from `from_s` on; in some containers, they start later. Raises: InvalidImage."""
        resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
        at_s = 0.0 if from_s <= 0 else math.inf
        try:
            self._container.seek(int((self._first_s + from_s) * av.time_base) if from_s > 0 else 0)
        except Exception:
            raise InvalidImage(DAMAGED) from None
        frames = decode_stream(self._container, self._stream, DAMAGED)
        for frame in chain(frames, (None,)):
            if frame is not None and frame.time is not None:
                at_s = frame.time - self._first_s
            try:
                pieces = resampler.resample(frame)
            except Exception:  # the sample format changes within the stream
                raise InvalidImage(DAMAGED) from None
            for piece in pieces:
                yield at_s, bytes(piece.planes[0])[: 4 * piece.samples]
                at_s += piece.samples / rate
