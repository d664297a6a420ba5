"""Images and questions about them, with the correct answers where they are known.

Called by the scenarios. Noise images can have any size and are used for any model. The samples of the built-in model
are scenes with known answers. A new image is one of these images with a number in a comment, so that no cache has it.
"""

import base64
import io
import math
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from PIL import Image

DATA_URL = "data:image/jpeg;base64,"
PNG_URL = "data:image/png;base64,"
PNG_HEAD_BYTES = 33  # signature and IHDR, which must come first
START_OF_IMAGE = b"\xff\xd8"
COMMENT = b"\xff\xfe"
COMMENT_BYTES = 14  # with the length field; the head's 18 bytes need no padding in base64


def noise_jpeg(num_bytes: int = 60_000) -> bytes:
    """The smallest square JPEG of uniform noise that has `num_bytes` or more."""
    side = math.isqrt(num_bytes)  # about 0.8 bytes per pixel
    while True:
        pixels = random.Random(0).randbytes(3 * side * side)
        buffer = io.BytesIO()
        Image.frombytes("RGB", (side, side), pixels).save(buffer, "JPEG", quality=85)
        if buffer.tell() >= num_bytes:
            return buffer.getvalue()
        side += 4


class NumberedUrls:
    """Data URLs of one image with different numbers. Only a few bytes are encoded for each."""

    def __init__(self, jpeg: bytes) -> None:
        self._tail = base64.b64encode(jpeg[len(START_OF_IMAGE) :]).decode()

    def url(self, number: int) -> str:
        """The data URL of the image with a comment that holds `number`: new bytes, equal pixels."""
        return DATA_URL + base64.b64encode(image_head(number)).decode() + self._tail


def image_head(number: int) -> bytes:
    comment = f"{number:0{COMMENT_BYTES - 2}d}".encode()
    return START_OF_IMAGE + COMMENT + COMMENT_BYTES.to_bytes(2, "big") + comment


def numbered_png(png: bytes, number: int) -> bytes:
    """The same image with a text chunk that holds `number`: new bytes, equal pixels."""
    chunk = b"tEXtComment\0%d" % number
    framed = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return png[:PNG_HEAD_BYTES] + framed + png[PNG_HEAD_BYTES:]


def to_png_url(png: bytes) -> str:
    return PNG_URL + base64.b64encode(png).decode()


SAMPLES = Path(__file__).parent.parent / "engines" / "packages" / "shapes" / "samples"
NUMBERS_OF_A_RUN = 10**6
NUM_RUNS = 10**6  # the product with NUMBERS_OF_A_RUN fits in a comment
MAX_GROUP = 4

#: A question and its only right answer; None: unknown.
Fact = tuple[str, str | None]

QUESTIONS = (
    "Describe the image.",
    "How many shapes are there?",
    "What color is the star?",
    "What is at the top left?",
    "Is there a green square?",
    "What color is the background?",
)

#: Facts of each sample, as `training/shapes` drew it.
SAMPLE_FACTS: dict[str, tuple[Fact, ...]] = {
    "shapes": (
        ("How many shapes are there?", "3"),
        ("What color is the star?", "red"),
        ("What is at the top left?", "a red star"),
        ("Is there a green square?", "yes"),
        ("What color is the background?", "white"),
        ("Where is the circle?", "center"),
    ),
    "night": (
        ("How many shapes are there?", "2"),
        ("What color is the ring?", "yellow"),
        ("Is there a green square?", "no"),
        ("What color is the background?", "black"),
        ("Where is the cross?", "bottom left"),
    ),
    "crowd": (
        ("How many shapes are there?", "4"),
        ("What color is the circle?", "yellow"),
        ("What is at the top center?", "a purple triangle"),
        ("Is there a ring?", "no"),
        ("What color is the background?", "gray"),
    ),
}
PAIR_FACTS: dict[tuple[str, str], tuple[Fact, ...]] = {
    ("shapes", "night"): (
        ("Which image has a ring?", "second"),
        ("Which image has a star?", "first"),
        ("Are the images the same?", "no"),
    ),
    ("crowd", "shapes"): (
        ("Which image has a triangle?", "first"),
        ("Which image has a square?", "second"),
        ("Which image has a white background?", "second"),
    ),
}


@dataclass(frozen=True, slots=True)
class Group:
    """Images as data URLs, and the facts about them."""

    urls: tuple[str, ...]
    facts: tuple[Fact, ...]


def _numbers_of(run: int) -> Iterator[int]:
    """The numbers of new images. `run` is random, so that no cache has these images from an earlier run."""
    return count(run % NUM_RUNS * NUMBERS_OF_A_RUN)


class NoiseAlbum:
    FACTS = tuple((question, None) for question in QUESTIONS)

    def __init__(self, run: int, num_bytes: int) -> None:
        self._numbers = _numbers_of(run)
        self._urls = NumberedUrls(noise_jpeg(num_bytes))

    def fixed(self) -> Group:
        return Group((self._urls.url(0),), self.FACTS)

    def new(self, draw: random.Random) -> Group:
        return Group((self._urls.url(next(self._numbers)),), self.FACTS)

    def several(self, draw: random.Random) -> Group:
        urls = [self._urls.url(next(self._numbers)) for _ in range(draw.randint(2, MAX_GROUP))]
        return Group(tuple(urls), (("Compare the images.", None),))


class ShapesAlbum:
    def __init__(self, run: int) -> None:
        self._numbers = _numbers_of(run)
        self._pngs = {name: (SAMPLES / f"{name}.png").read_bytes() for name in SAMPLE_FACTS}

    def fixed(self) -> Group:
        name = next(iter(SAMPLE_FACTS))
        return Group((to_png_url(self._pngs[name]),), SAMPLE_FACTS[name])

    def new(self, draw: random.Random) -> Group:
        name = draw.choice(list(SAMPLE_FACTS))
        return Group((self._numbered(name),), SAMPLE_FACTS[name])

    def several(self, draw: random.Random) -> Group:
        names = draw.choice(list(PAIR_FACTS))
        return Group(tuple(map(self._numbered, names)), PAIR_FACTS[names])

    def _numbered(self, name: str) -> str:
        return to_png_url(numbered_png(self._pngs[name], next(self._numbers)))


Album = NoiseAlbum | ShapesAlbum


def create_album(model: str, run: int, num_bytes: int) -> Album:
    return ShapesAlbum(run) if model == "shapes" else NoiseAlbum(run, num_bytes)
