"""Images for load: random noise, which no format can make smaller, the same for the same seed.

Called by the scenarios. An image that no cache has seen costs no drawing: only a
number in a JPEG comment differs, so that its bytes and their hash are new and its pixels are not.
"""

import base64
import io
import math
import random
import struct
import zlib

from PIL import Image

DATA_URL = "data:image/jpeg;base64,"
PNG_URL = "data:image/png;base64,"
PNG_HEAD_BYTES = 33  # signature and IHDR, before which no other chunk may stand
START_OF_IMAGE = b"\xff\xd8"
COMMENT = b"\xff\xfe"
COMMENT_BYTES = 14  # with its own two length bytes: 2 + 2 + 14 = 18 in front, whole base64 groups
HEAD_BYTES = len(START_OF_IMAGE) + len(COMMENT) + COMMENT_BYTES


def noise_jpeg(num_bytes: int = 60_000, seed: int = 0) -> bytes:
    """A square JPEG of uniform noise, the first of growing side to reach `num_bytes`."""
    side = math.isqrt(num_bytes)  # about 0.8 bytes for a pixel
    while True:
        pixels = random.Random(seed).randbytes(3 * side * side)
        buffer = io.BytesIO()
        Image.frombytes("RGB", (side, side), pixels).save(buffer, "JPEG", quality=85)
        if buffer.tell() >= num_bytes:
            return buffer.getvalue()
        side += 4


def numbered(jpeg: bytes, number: int) -> bytes:
    """The same image with a comment that holds `number`: new bytes, equal pixels."""
    return image_head(number) + jpeg[len(START_OF_IMAGE) :]


def to_data_url(jpeg: bytes) -> str:
    return DATA_URL + base64.b64encode(jpeg).decode()


class NumberedUrls:
    """Data URLs of one image under ever new numbers, at the cost of a few bytes each."""

    def __init__(self, jpeg: bytes) -> None:
        self._tail = base64.b64encode(jpeg[len(START_OF_IMAGE) :]).decode()

    def url(self, number: int) -> str:
        """The data URL of `numbered(jpeg, number)`."""
        return DATA_URL + base64.b64encode(image_head(number)).decode() + self._tail


def image_head(number: int) -> bytes:
    """The first HEAD_BYTES bytes of the image with this number."""
    comment = f"{number:0{COMMENT_BYTES - 2}d}".encode()
    return START_OF_IMAGE + COMMENT + COMMENT_BYTES.to_bytes(2, "big") + comment


def numbered_png(png: bytes, number: int) -> bytes:
    """The same image with a text chunk that holds `number`: new bytes, equal pixels."""
    chunk = b"tEXtComment\0%d" % number
    framed = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return png[:PNG_HEAD_BYTES] + framed + png[PNG_HEAD_BYTES:]


def to_png_url(png: bytes) -> str:
    return PNG_URL + base64.b64encode(png).decode()
