"""Images, videos and audio for a server that expands them itself: the prompt has one token per file.

The worker's sandboxed decoder reads the client's bytes. The server receives the decoded media as PNG, JPEG and WAV.
"""

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from struct import Struct
from typing import Any, Literal

from PIL import Image

from engines.base import DEFAULT_NUM_FRAMES, InvalidImage, OpenAudio, OpenVideo, sample_evenly
from engines.core.runner import NO_LIMITS, PixelLimits
from engines.packages.checkpoint_json import read_json
from engines.text.chat_template import LLAVA_TEMPLATE, PLAIN_TEMPLATE
from engines.text.processor import Item, MultimodalProcessor
from engines.text.tokenizer import readable
from shared.protocol import FRAMES_TYPE

_TICKS_PER_S = 2**16  #: time base of MP4 files, in which times are exact as floats
_WAV_FORMAT, _IEEE_FLOAT = Struct("<HHIIHH"), 3
AUDIO_RATE = 16_000  #: samples a second, the usual input rate of speech models
_TOKEN_FIELDS = {
    "image": ("image_token_index", "image_token_id", "boi_token_index", "boi_token_id"),
    "video": ("video_token_index", "video_token_id"),
    "audio": ("audio_token_index", "audio_token_id"),
}


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A video or audio as a data URL."""

    kind: Literal["video", "audio"]
    url: str

    @property
    def nbytes(self) -> int:
        return len(self.url)


class UnexpandedMedia(MultimodalProcessor):
    """The server processes media, and counts their tokens and positions. `slot_id` is None without images."""

    max_audio_s = math.inf

    def __init__(self, tokens: Mapping[str, tuple[int, str]], max_frames: float) -> None:
        """`tokens` are (id, text) of the template's token for each kind of media.

        `max_frames`: limit per video; the server would ignore further frames.
        """
        super().__init__(LLAVA_TEMPLATE if "image" in tokens else PLAIN_TEMPLATE)
        self.slot_id = tokens["image"][0] if "image" in tokens else None
        self.video_placeholder = tokens["video"][1] if "video" in tokens else ""
        self.audio_placeholder = tokens["audio"][1] if "audio" in tokens else ""
        self._tokens, self._max_frames = tokens, max_frames

    def process(self, image: Image.Image, pixels: PixelLimits = NO_LIMITS) -> bytes:
        """A PNG file of the image, scaled to the request's limits. Raises: InvalidImage."""
        return super().process(image) if self.slot_id is None else to_png(image, pixels)

    def process_video(self, video: OpenVideo) -> MediaFile:
        return to_jpegs(video, self._max_frames)

    def process_audio(self, audio: OpenAudio) -> MediaFile:
        return to_wav(audio)

    def items(self, images: Sequence[tuple[str, Any]], slot: str) -> list[Item]:
        """One token for each file."""
        return [self._item(name, content, slot) for name, content in images]

    def _item(self, name: str, content: bytes | MediaFile, slot: str) -> Item:
        if isinstance(content, bytes):
            return Item(name, 1, content, slot)
        token_id, text = self._tokens[content.kind]
        return Item(name, 1, content, text, kind=content.kind, slot_id=token_id)


def to_png(image: Image.Image, pixels: PixelLimits) -> bytes:
    file = BytesIO()
    pixels.scale(image).save(file, "PNG", compress_level=1)
    return file.getvalue()


def to_jpegs(video: OpenVideo, max_frames: float = math.inf) -> MediaFile:
    """Evenly sampled frames as JPEG files, in the format that vLLM accepts. Raises: InvalidImage."""
    indices = sample_evenly(video)
    _check_limit(video, "frames", len(indices), max_frames)
    files = (b64encode(_to_jpeg(frame)).decode() for frame in video.frames(indices))
    return MediaFile("video", f"data:{FRAMES_TYPE};base64,{','.join(files)}")


def to_mp4(video: OpenVideo, max_frames: float, max_fps: float) -> MediaFile:
    """Evenly sampled frames at their true rate as Motion JPEG in MP4. Raises: InvalidImage."""
    import av  # noqa: PLC0415  # an extra

    info = video.info
    indices = sample_evenly(video, int(min(DEFAULT_NUM_FRAMES, max(1.0, info.length_s * max_fps))))
    ticks = _TICKS_PER_S / info.fps * (indices[-1] - indices[0]) / max(1, len(indices) - 1)
    duration = math.ceil(round(ticks, 3)) or _TICKS_PER_S
    _check_limit(video, "frames", len(indices), max_frames)
    _check_limit(video, "frames a second", _TICKS_PER_S / duration, max_fps)
    frames = video.frames(indices)
    files = [_to_jpeg(frame) for frame in frames]
    files += files[-1:] * (len(files) % 2)  # SGLang reads an even number of frames
    file, (width, height) = BytesIO(), frames[0].size
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_mux_stream("mjpeg", width=width, height=height)
        stream.time_base = Fraction(1, _TICKS_PER_S)
        for index, data in enumerate(files):
            packet = av.Packet(data)
            packet.stream, packet.time_base, packet.is_keyframe = stream, stream.time_base, True
            packet.pts = packet.dts = index * duration
            packet.duration = duration
            container.mux(packet)
    return MediaFile("video", f"data:video/mp4;base64,{b64encode(file.getvalue()).decode()}")


def _check_limit(video: OpenVideo, unit: str, number: float, limit: float) -> None:
    """Raises: InvalidImage."""
    if number > limit:
        raise InvalidImage(
            f"The video would have {number:g} {unit}, but the limit of the model's server is {limit:g}: "
            "send a lower fps or num_frames.",
            "num_frames" if video.options.fps is None else "fps",
        )


def _to_jpeg(frame: Image.Image) -> bytes:
    file = BytesIO()
    frame.save(file, "JPEG", quality=95)
    return file.getvalue()


def to_wav(audio: OpenAudio) -> MediaFile:
    """A WAV file of one channel of float32. Source: Microsoft, "Multiple channel audio data and WAVE files"."""
    form = _WAV_FORMAT.pack(_IEEE_FLOAT, 1, AUDIO_RATE, 4 * AUDIO_RATE, 4, 32)
    chunks = b"".join(
        name + len(data).to_bytes(4, "little") + data
        for name, data in ((b"fmt ", form), (b"data", audio.samples(AUDIO_RATE)))
    )
    file = b"RIFF" + (4 + len(chunks)).to_bytes(4, "little") + b"WAVE" + chunks
    return MediaFile("audio", f"data:audio/wav;base64,{b64encode(file).decode()}")


@readable()
def find_media_tokens(directory: Path, template: str) -> dict[str, tuple[int, str]]:
    """Id and text of the template's token for each supported kind of media. Raises: UnsupportedCheckpoint."""
    config = read_json(directory / "config.json")
    added = read_json(directory / "tokenizer.json").get("added_tokens") or []
    spelled: dict[int, str] = {token["id"]: token["content"] for token in added}
    tokens: dict[str, tuple[int, str]] = {}
    for kind, names in _TOKEN_FIELDS.items():
        ids = [found for name in names if isinstance(found := config.get(name), int)]
        found = [i for i in ids if spelled.get(i) and spelled[i] in template]
        found = found or (ids if kind == "image" else [])  # a template without images
        if found:
            tokens[kind] = found[0], spelled.get(found[0], "")
    return tokens


def data_url(content: bytes | MediaFile) -> str:
    """The URL of a PNG file, or of a video or audio."""
    if isinstance(content, MediaFile):
        return content.url
    return f"data:image/png;base64,{b64encode(content).decode()}"
