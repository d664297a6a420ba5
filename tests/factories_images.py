"""Small deterministic images; different seeds give different images."""

import base64
import io
import random
import struct
import zlib
from contextlib import closing
from typing import Any

from PIL import Image, ImageDraw

from gateway.media.loader import ImageLoader, ImageSource, LoadedImage
from shared.settings.limits import LimitSettings
from tests.factories_settings import make_group


def make_image(seed: int = 0, size: tuple[int, int] = (64, 48), mode: str = "RGB") -> Image.Image:
    """Returns a flat background with one disc, whose colors and place depend on the seed."""
    draw_from = random.Random(seed)
    image = Image.new("RGB", size, tuple(draw_from.randrange(256) for _ in range(3)))
    left, top = (draw_from.randrange(max(1, side // 2)) for side in size)
    colour = tuple(draw_from.randrange(256) for _ in range(3))
    ImageDraw.Draw(image).ellipse((left, top, left + size[0] // 3, top + size[1] // 3), colour)
    return image.convert(mode)


def encoded(seed: int = 0, size: tuple[int, int] = (64, 48), format: str = "PNG") -> bytes:
    """Returns the image's bytes in a file format."""
    buffer = io.BytesIO()
    make_image(seed, size).save(buffer, format)
    return buffer.getvalue()


def data_url(seed: int = 0, size: tuple[int, int] = (64, 48), format: str = "PNG") -> str:
    text = base64.b64encode(encoded(seed, size, format)).decode()
    return f"data:image/{format.lower()};base64,{text}"


def png_url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def image_part(url: str) -> dict[str, Any]:
    """Returns an image part of a chat message."""
    return {"type": "image_url", "image_url": {"url": url}}


def two_headed_png(first: tuple[int, int], second: tuple[int, int]) -> bytes:
    """Returns a black image with one size for readers of headers, and another for decoders."""
    headers = [
        png_chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 0, 0, 0, 0))
        for size in (first, second)
    ]
    rows = png_chunk(b"IDAT", zlib.compress(bytes((second[0] + 1) * second[1])))
    return b"".join([b"\x89PNG\r\n\x1a\n", *headers, rows, png_chunk(b"IEND", b"")])


def png_chunk(kind: bytes, content: bytes) -> bytes:
    crc = struct.pack(">I", zlib.crc32(kind + content))
    return struct.pack(">I", len(content)) + kind + content + crc


async def load(
    *sources: ImageSource, fetcher: Any = None, uses_disk: bool = False, **limits: Any
) -> list[LoadedImage]:
    """Loads images in a gateway with enough memory."""
    own = make_group(LimitSettings, **limits)
    with closing(ImageLoader(own, fetcher, uses_disk=uses_disk)) as loader:
        return await loader.load_all(sources, lambda _: None)
