"""Small audio files, created with PyAV."""

import io
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from PIL import Image

from tests.factories_video import av, make_clip


def tone(seconds: float, rate: int, channels: int = 1) -> np.ndarray:
    """Returns a tone that rises from 200 to 1,000 Hz within 4 s. Shapes: returns (channels, samples)."""
    at = np.arange(round(seconds * rate)) / rate
    wave = 0.5 * np.sin(2 * np.pi * (200 + 100 * at) * at)
    return np.tile(wave.astype(np.float32), (channels, 1))


def hum(seconds: float, rate: int, pauses: Sequence[float] = ()) -> np.ndarray:
    """Returns a tone of 300 Hz that pauses for half a second at these times. Shapes: returns (1, samples)."""
    at = np.arange(round(seconds * rate)) / rate
    wave = 0.3 * np.sin(2 * np.pi * 300 * at)
    for start in pauses:
        wave[(at >= start) & (at < start + 0.5)] = 0
    return wave.astype(np.float32)[None]


def make_audio(
    codec: str = "pcm_s16le",
    form: str = "wav",
    seconds: float = 2.0,
    *,
    rate: int = 16_000,
    layout: str = "mono",
    pauses: Sequence[float] | None = None,
) -> bytes:
    """Returns a tone; with `pauses`, a hum of one channel."""
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        wave = tone(seconds, rate, stream.layout.nb_channels)
        wave = wave if pauses is None else hum(seconds, rate, pauses)
        size = 1024
        for start in range(0, wave.shape[1], size):
            piece = np.ascontiguousarray(wave[:, start : start + size])
            frame = av.AudioFrame.from_ndarray(piece, format="fltp", layout=layout)
            frame.rate, frame.pts = rate, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def claiming(place: int, value: int, num_bytes: int = 4) -> bytes:
    """Returns a WAV file with a changed header: channels are at byte 22, the rate at 24, the data size at 74."""
    data = bytearray(make_audio())
    data[place : place + num_bytes] = value.to_bytes(num_bytes, "little")
    return bytes(data)


def with_picture(mp3: bytes) -> bytes:
    """Returns the MP3 file after an ID3 tag with an album picture."""
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    body = b"\0image/png\0\3\0" + file.getvalue()
    frame = b"APIC" + len(body).to_bytes(4, "big") + b"\0\0" + body
    size = bytes(len(frame) >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\3\0\0" + size + frame + mp3


@cache
def sound(name: str) -> bytes:
    return SOUNDS[name][0]()


#: Files of 2 s by name: a function that creates one, its media type, and its defect or "".
SOUNDS: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "wav": (make_audio, "audio/wav", ""),
    "stereo": (lambda: make_audio(rate=44_100, layout="stereo"), "audio/wav", ""),
    "float": (lambda: make_audio("pcm_f32le", rate=8000), "audio/wav", ""),
    "mp3": (lambda: make_audio("libmp3lame", "mp3", rate=44_100), "audio/mpeg", ""),
    "picture": (lambda: with_picture(sound("mp3")), "audio/mpeg", ""),
    "flac": (lambda: make_audio("flac", "flac", rate=48_000), "audio/flac", ""),
    "opus": (lambda: make_audio("libopus", "ogg", rate=48_000), "audio/ogg", ""),
    "m4a": (lambda: make_audio("aac", "ipod", rate=44_100, layout="stereo"), "audio/mp4", ""),
    "aac": (lambda: make_audio("aac", "adts", rate=44_100), "audio/aac", ""),
    "webm": (lambda: make_audio("libopus", "webm", rate=48_000), "audio/webm", ""),
    "claims 2 GB": (lambda: claiming(74, 2**31 - 1), "audio/wav", ""),
    "long": (lambda: make_audio(seconds=1801, rate=1000), "audio/wav", "1801 s long: send at most 1800"),
    "many channels": (lambda: claiming(22, 16, 2), "audio/wav", "send at most 8"),
    "slow rate": (lambda: claiming(24, 10), "audio/wav", "10 samples a second"),
    "another codec": (lambda: make_audio("adpcm_ima_wav"), "audio/wav", "codec of the audio is not supported"),
    "video only": (make_clip, "audio/mp4", "has no audio"),
    "no samples": (lambda: make_audio(seconds=0), "audio/wav", "no samples|damaged"),
    "nonsense": (lambda: b"OggS" + b"\xff" * 4096, "audio/ogg", "damaged or in an unsupported format"),
    "cut": (lambda: make_audio("aac", "ipod", rate=44_100)[:200], "audio/mp4", "damaged or in an unsupported format"),
    "playlist": (lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "audio/mpeg", "damaged|no audio|no samples"),
}  # fmt: skip
