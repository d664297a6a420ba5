"""Images for a server that expands them itself: the prompt has one token for each image.

The worker's sandboxed decoder reads the client's bytes; the server gets a PNG file of these pixels.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from struct import Struct
from typing import Any

from PIL import Image

from engines.core.runner import NO_LIMITS, PixelLimits
from engines.packages.checkpoint_json import read_json
from engines.text.processor import Item, MultimodalProcessor
from shared.protocol import FRAMES_TYPE

_WAV_FORMAT, _IEEE_FLOAT = Struct("<HHIIHH"), 3
_TOKEN_FIELDS = ("image_token_index", "image_token_id", "boi_token_index", "boi_token_id")


class UnexpandedImages(MultimodalProcessor):
    """The server resizes images, and counts their tokens and positions. `slot_id` is None for a text-only model."""

    def __init__(self, slot_id: int | None, template: str) -> None:
        super().__init__(template)
        self.slot_id = slot_id

    def process(self, image: Image.Image, pixels: PixelLimits = NO_LIMITS) -> bytes:
        """A PNG file of the image, scaled to the request's limits. Raises: InvalidImage."""
        return super().process(image) if self.slot_id is None else to_png(image, pixels)

    def items(self, images: Sequence[tuple[str, Any]], slot: str) -> list[Item]:
        """One token for each image."""
        return [Item(image_hash, 1, content, slot) for image_hash, content in images]


def to_png(image: Image.Image, pixels: PixelLimits) -> bytes:
    file = BytesIO()
    pixels.scale(image).save(file, "PNG", compress_level=1)
    return file.getvalue()


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A video or audio as a part of a message of OpenAI's API."""

    part: dict[str, Any]
    nbytes: int


def to_jpegs(frames: Sequence[Image.Image]) -> MediaPart:
    """A video as JPEG files of its frames, in the form that vLLM takes."""
    files = []
    for frame in frames:
        file = BytesIO()
        frame.save(file, "JPEG", quality=95)
        files.append(b64encode(file.getvalue()).decode())
    url = f"data:{FRAMES_TYPE};base64,{','.join(files)}"
    return MediaPart({"type": "video_url", "video_url": {"url": url}}, len(url))


def to_wav(samples: bytes, rate: int) -> MediaPart:
    """A WAV file of one channel of float32. Source: Microsoft, "Multiple channel audio data and WAVE files"."""
    form = _WAV_FORMAT.pack(_IEEE_FLOAT, 1, rate, 4 * rate, 4, 32)
    chunks = b"".join(
        name + len(data).to_bytes(4, "little") + data
        for name, data in ((b"fmt ", form), (b"data", samples))
    )
    file = b"RIFF" + (4 + len(chunks)).to_bytes(4, "little") + b"WAVE" + chunks
    data = b64encode(file).decode()
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return MediaPart(part, len(data))


def find_image_token(directory: Path, template: str) -> int | None:
    """The template's token for an image; None for a text-only model. Raises: UnsupportedCheckpoint."""
    config = read_json(directory / "config.json")
    ids = [found for name in _TOKEN_FIELDS if isinstance(found := config.get(name), int)]
    added = read_json(directory / "tokenizer.json").get("added_tokens") or []
    spelled = {token["id"]: token["content"] for token in added}
    in_template = [i for i in ids if spelled.get(i) and spelled[i] in template]
    return next(iter(in_template or ids), None)


def data_url(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode()}"
