"""Encoded images to RGB. The bytes come from strangers: five formats, fixed error texts, first frames only.

Runs in the worker's threads, or in child processes of it that have nothing to lose.
"""

import io

from PIL import AvifImagePlugin, Image, ImageOps

from engines.base import InvalidImage

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "AVIF")
MAX_PIXELS = 128_000_000  # the last defence of memory; gateways allow less
FORMAT_NAMES = "PNG, JPEG, WebP, GIF and AVIF"
CANNOT_DECODE = f"The image cannot be decoded; {FORMAT_NAMES} are understood."
_OTHER_SIZE = "The image is of another size than its header says."
_ALPHA_BANDS = frozenset("Aa")

AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # a sandboxed child may start none


def decode_image(data: bytes, expected_size: tuple[int, int] | None = None) -> Image.Image:
    """The first frame in RGB, upright, transparency on white.

    A file may say two sizes, to the reader of its header and to its decoder: `expected_size`, as (width,
    height), is held against the decoder's before memory is taken. Raises: InvalidImage.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if expected_size is not None and image.size != expected_size:
                raise InvalidImage(_OTHER_SIZE)
            if image.width * image.height > MAX_PIXELS:
                raise InvalidImage(f"The image is too large: send at most {MAX_PIXELS} pixels.")
            image.seek(0)
            image.load()
            return _to_rgb(_upright(image))
    except InvalidImage:
        raise
    except Exception:  # decoders of broken files fail in any way that Pillow can
        raise InvalidImage(CANNOT_DECODE) from None


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # broken metadata is no reason to refuse a sound image
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        # Pillow clips 16-bit grey to white; the upper byte is the image.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if _ALPHA_BANDS & set(image.getbands()) or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")
