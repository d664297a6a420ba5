"""Images, videos and audio for a server that expands them itself: the prompt has one token for each.

The worker's sandboxed decoder reads the client's bytes; the server gets PNG, JPEG and WAV files of what it decoded.
"""

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from struct import Struct
from typing import Any, Literal

from PIL import Image

from engines.base import InvalidImage, OpenAudio, OpenVideo, sample_evenly
from engines.core.runner import NO_LIMITS, PixelLimits
from engines.packages.checkpoint_json import read_json
from engines.text.chat_template import LLAVA_TEMPLATE, PLAIN_TEMPLATE
from engines.text.processor import Item, MultimodalProcessor
from shared.protocol import FRAMES_TYPE

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

        `max_frames`: of a video; the server would ignore further ones.
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
        """One token for each."""
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
    """Evenly sampled frames as JPEG files, in the form that vLLM takes. Raises: InvalidImage."""
    indices = sample_evenly(video)
    if len(indices) > max_frames:
        raise InvalidImage(
            f"The video would have {len(indices)} frames, but the model's server reads {max_frames}: send at most "
            f"{max_frames}, by a lower fps or num_frames.",
            "num_frames" if video.options.fps is None else "fps",
        )
    files = []
    for frame in video.frames(indices):
        file = BytesIO()
        frame.save(file, "JPEG", quality=95)
        files.append(b64encode(file.getvalue()).decode())
    return MediaFile("video", f"data:{FRAMES_TYPE};base64,{','.join(files)}")


def to_wav(audio: OpenAudio) -> MediaFile:
    """A WAV file of one channel of float32. Source: Microsoft, "Multiple channel audio data and WAVE files"."""
    form = _WAV_FORMAT.pack(_IEEE_FLOAT, 1, AUDIO_RATE, 4 * AUDIO_RATE, 4, 32)
    chunks = b"".join(
        name + len(data).to_bytes(4, "little") + data
        for name, data in ((b"fmt ", form), (b"data", audio.samples(AUDIO_RATE)))
    )
    file = b"RIFF" + (4 + len(chunks)).to_bytes(4, "little") + b"WAVE" + chunks
    return MediaFile("audio", f"data:audio/wav;base64,{b64encode(file).decode()}")


def find_media_tokens(directory: Path, template: str) -> dict[str, tuple[int, str]]:
    """Id and text of the template's token for each kind of media that the model takes. Raises: UnsupportedCheckpoint."""
    config = read_json(directory / "config.json")
    added = read_json(directory / "tokenizer.json").get("added_tokens") or []
    spelled: dict[int, str] = {token["id"]: token["content"] for token in added}
    tokens: dict[str, tuple[int, str]] = {}
    for kind, names in _TOKEN_FIELDS.items():
        ids = [found for name in names if isinstance(found := config.get(name), int)]
        found = [i for i in ids if spelled.get(i) and spelled[i] in template]
        if kind == "image" and not found:  # a template of text alone
            found = ids
        if found:
            tokens[kind] = found[0], spelled.get(found[0], "")
    return tokens


def data_url(content: bytes | MediaFile) -> str:
    """The URL of a PNG file, or of a video or audio."""
    if isinstance(content, MediaFile):
        return content.url
    return f"data:image/png;base64,{b64encode(content).decode()}"
