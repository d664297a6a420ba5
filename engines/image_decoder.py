"""Decodes untrusted images to RGB: five formats, fixed error texts, first frames only.

Runs in the worker's threads or in its sandboxed child processes.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from PIL import AvifImagePlugin, Image, ImageFile, ImageOps

from engines.base import InvalidImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF")
MAX_PIXELS = 128_000_000  # bounds memory; the limits of gateways are lower
FORMAT_NAMES = "PNG, JPEG, WebP, GIF and AVIF"
CANNOT_DECODE = f"The image cannot be decoded; {FORMAT_NAMES} are supported."
_ALPHA_BANDS = frozenset("Aa")
#: Factors that scale samples of a PNG to 8 bits. Pillow scales the pixels, but not the transparent color.
_SCALES = {"L;2": 85, "L;4": 17, "I;16B": 1 / 256, "RGB;16B": 1 / 256}

AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # a sandboxed child cannot start threads


def decode_image(data: bytes, expected_size: tuple[int, int] | None = None) -> Image.Image:
    """Decode the first frame to RGB: upright, with transparent pixels on white.

    The decoder's size, which may differ from the header's, is compared with `expected_size` (width, height) before
    memory is allocated. Raises: InvalidImage.
    """
    with open_image(data, expected_size) as image:
        if image.width * image.height > MAX_PIXELS:
            raise InvalidImage(f"The image is too large: send at most {MAX_PIXELS} pixels.")
        image.seek(0)
        _scale_transparency(image)
        image.load()
        upright: Image.Image = image
        with suppress(Exception):  # broken metadata
            upright = ImageOps.exif_transpose(image)
        return _to_rgb(upright)


@contextmanager
def open_image(data: bytes, expected_size: tuple[int, int] | None) -> Iterator[ImageFile.ImageFile]:
    """Open an image without decoding it. Raises: InvalidImage, also for errors in the `with` block."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if expected_size is not None and image.size != expected_size:
                raise InvalidImage("The size of the image differs from its header.")
            yield image
    except InvalidImage:
        raise
    except Exception:  # Pillow may raise any error for a broken file
        raise InvalidImage(CANNOT_DECODE) from None


def _scale_transparency(image: ImageFile.ImageFile) -> None:
    has_samples = image.format == "PNG" and image.tile
    scale = _SCALES.get(str(image.tile[0].args)) if has_samples else None
    color = image.info.get("transparency")
    if scale and color is not None:
        is_rgb = isinstance(color, tuple)
        values = [int(value * scale) for value in (color if is_rgb else (color,))]
        image.info["transparency"] = tuple(values) if is_rgb else values[0]


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        # Pillow clips 16-bit grey to white; use the upper byte
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if _ALPHA_BANDS & set(image.getbands()) or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
