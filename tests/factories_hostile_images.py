"""Broken, odd or hostile images, created by code, each with its expected outcome."""

import gzip
import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from PIL import Image, PngImagePlugin

from tests.factories_images import encoded, make_image, two_headed_png
from tests.factories_images import png_chunk as chunk

SIZE = (64, 48)
SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Case:
    """A file. `door`: the gateway's error code, or None if it is accepted. `decodes`: whether it can be decoded."""

    name: str
    make: Callable[[], bytes]
    door: str | None = None
    decodes: bool = True
    size: tuple[int, int] | None = None  #: of the decoded image, if it is not `SIZE`
    pixel: tuple[int, int, int] | None = None  #: its color in the upper left corner, within 3


def ihdr(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))


def png(*chunks: bytes) -> bytes:
    return b"".join([SIGNATURE, *chunks, chunk(b"IEND", b"")])


def rows(width: int, height: int, pixel: bytes = b"\xff\0\0") -> bytes:
    return chunk(b"IDAT", zlib.compress((b"\0" + pixel * width) * height))


def with_chunk(extra: bytes) -> bytes:
    """Returns a valid image with one more chunk after its header."""
    data = encoded()
    return data[:33] + extra + data[33:]


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def red(mode: str = "RGB", colour: Any = (255, 0, 0)) -> Image.Image:
    return Image.new(mode, SIZE, colour)


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags.tobytes()


def oriented(orientation: int, form: str = "JPEG") -> bytes:
    """Returns an image that viewers show with red in the upper left corner, and blue elsewhere."""
    upright = Image.new("RGB", (32, 16), "blue")
    upright.paste("red", (0, 0, 16, 8))
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    return saved(stored, form, exif=exif(orientation), quality=95)


def jpeg(**options: Any) -> bytes:
    return saved(make_image(), "JPEG", **options)


def jpeg_of_two_frames(width: int, height: int) -> bytes:
    data = jpeg()
    start = data.index(b"\xff\xc0")
    length = 2 + int.from_bytes(data[start + 2 : start + 4], "big")
    frame = bytearray(data[start : start + length])
    frame[5:9] = struct.pack(">HH", height, width)
    return data[: start + length] + bytes(frame) + data[start + length :]


def jpeg_of_size(width: int, height: int) -> bytes:
    """Returns a JPEG whose only frame header has another size than its data."""
    data = bytearray(jpeg())
    start = data.index(b"\xff\xc0")
    data[start + 5 : start + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def jpeg_of_many_scans() -> bytes:
    """Returns a progressive JPEG that repeats one of its scans thousands of times."""
    data = saved(Image.new("RGB", (2048, 2048), "red"), "JPEG", progressive=True)
    start, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[start:end] * (4_000_000 // (end - start)) + data[end:]


def webp(**options: Any) -> bytes:
    return saved(make_image(), "WEBP", **options)


def animated(form: str) -> bytes:
    frames = [Image.new("RGB", SIZE, colour) for colour in ("red", "lime", "blue")]
    return saved(frames[0], form, save_all=True, append_images=frames[1:], duration=10)


def webp_of_size(width: int, height: int) -> bytes:
    """Returns an extended WebP whose canvas has another size than its image."""
    data = bytearray(webp(exif=exif(1)))
    data[24:27], data[27:30] = (width - 1).to_bytes(3, "little"), (height - 1).to_bytes(3, "little")
    return bytes(data)


def gif_of_screen(width: int, height: int) -> bytes:
    """Returns a GIF whose screen has another size than its frame."""
    data = encoded(format="GIF")
    return data[:6] + struct.pack("<HH", width, height) + data[10:]


def gif_with(blocks: bytes) -> bytes:
    """Returns a GIF with more blocks before its frame."""
    data = encoded(format="GIF")
    start = 13 + 3 * 2 ** ((data[10] & 7) + 1) if data[10] & 0x80 else 13
    return data[:start] + blocks + data[start:]


def avif() -> bytes:
    return saved(make_image(), "AVIF")


def avif_of_junk() -> bytes:
    data = avif()
    start = data.index(b"mdat") + 4
    return data[:start] + b"\xff" * (len(data) - start)


def avif_of_size(width: int, height: int) -> bytes:
    data = avif()
    place = data.index(b"ispe") + 8
    return data[:place] + struct.pack(">II", width, height) + data[place + 8 :]


def text_bomb(kind: bytes) -> bytes:
    """Returns 100 MB of text in 100 kB."""
    packed = zlib.compress(bytes(100_000_000), 9)
    head = b"key\0\1\0\0\0" if kind == b"iTXt" else b"key\0\0"
    return with_chunk(chunk(kind, head + packed))


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("evil.txt", "x" * 100)
    return buffer.getvalue()


def commented() -> bytes:
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "\ud7ff" * 100)
    return saved(red(), "PNG", pnginfo=info)


def hidden() -> Image.Image:
    """Returns an image whose red pixels are all transparent."""
    return Image.new("RGBA", SIZE, (255, 0, 0, 0))


def palette(transparent: int | None = None) -> bytes:
    image = red().convert("P", palette=Image.Palette.ADAPTIVE, colors=2)
    return saved(image, "PNG", **({} if transparent is None else {"transparency": transparent}))


WHITE, RED, GREY = (255, 255, 255), (255, 0, 0), (128, 128, 128)
UNSUPPORTED, INVALID, LARGE = "unsupported_image", "invalid_image", "image_too_large"

NOT_IMAGES = [
    Case("empty", lambda: b"", INVALID),
    Case("text", lambda: b"hello", UNSUPPORTED),
    Case("svg", lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", UNSUPPORTED),
    Case("html", lambda: b"<html><img src=x></html>", UNSUPPORTED),
    Case("pdf", lambda: b"%PDF-1.7\n", UNSUPPORTED),
    Case("elf", lambda: b"\x7fELF" + bytes(60), UNSUPPORTED),
    Case("zip", zipped, UNSUPPORTED),
    Case("gzip", lambda: gzip.compress(bytes(1000)), UNSUPPORTED),
    Case("tiff", lambda: encoded(format="TIFF"), UNSUPPORTED),
    Case("bmp", lambda: encoded(format="BMP"), UNSUPPORTED),
    Case("ico", lambda: encoded(format="ICO"), UNSUPPORTED),
    Case("ppm", lambda: encoded(format="PPM"), UNSUPPORTED),
    Case("jpeg 2000", lambda: b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(80), UNSUPPORTED),
    Case("heic", lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(80), UNSUPPORTED),
    Case("psd", lambda: b"8BPS\0\1" + bytes(80), UNSUPPORTED),
    Case("fits", lambda: b"SIMPLE  =                    T" + bytes(80), UNSUPPORTED),
    Case("eps", lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n", UNSUPPORTED),
    Case("wav in riff", lambda: b"RIFF\x24\0\0\0WAVEfmt " + bytes(40), UNSUPPORTED),
]  # fmt: skip
PNGS = [
    Case("png", encoded),
    Case("png signature alone", lambda: SIGNATURE, INVALID),
    Case("png header cut", lambda: encoded()[:30], INVALID),
    Case("png header alone", lambda: SIGNATURE + ihdr(64, 48), decodes=False),
    Case("png cut in its pixels", lambda: saved(Image.effect_noise(SIZE, 90), "PNG")[:1000], decodes=False),
    Case("png without pixels", lambda: png(ihdr(64, 48)), decodes=False),
    Case("png of junk pixels", lambda: png(ihdr(64, 48), chunk(b"IDAT", b"junk" * 20)), decodes=False),
    Case("png of too few pixels", lambda: png(ihdr(64, 48), rows(64, 2, b"\xff\0\0")), pixel=RED),
    Case("png of a bad checksum", lambda: SIGNATURE + ihdr(64, 48)[:-4] + bytes(4) + encoded()[33:], decodes=False),
    Case("png of 60000 x 60000", lambda: png(ihdr(60_000, 60_000)), LARGE),
    Case("png of 13000 x 13000", lambda: png(ihdr(13_000, 13_000)), LARGE),
    Case("png of 2^31 x 1", lambda: png(ihdr(2**31, 1)), LARGE),
    Case("png of 65500 x 1", lambda: png(ihdr(65_500, 1), rows(65_500, 1)), LARGE),
    Case("png of 1 x 2000", lambda: png(ihdr(1, 2000), rows(1, 2000)), INVALID),
    Case("png of 0 x 0", lambda: png(ihdr(0, 0)), INVALID),
    Case("png of 0 x 7", lambda: png(ihdr(0, 7)), INVALID),
    Case("png of one pixel", lambda: png(ihdr(1, 1), rows(1, 1)), size=(1, 1), pixel=RED),
    Case("png of 2 x 3", lambda: png(ihdr(2, 3), rows(2, 3)), size=(2, 3), pixel=RED),
    Case("png of two headers", lambda: two_headed_png((8, 8), (1, 4000)), INVALID),
    Case("png of 8000 x 8000 in 200 kB", lambda: saved(Image.new("L", (8000, 8000)), "PNG"), LARGE),
    Case("png of bomb text zTXt", lambda: text_bomb(b"zTXt"), decodes=False),
    Case("png of bomb text iTXt", lambda: text_bomb(b"iTXt"), decodes=False),
    Case("png of bomb profile", lambda: text_bomb(b"iCCP"), decodes=False),
    Case("png of an endless chunk", lambda: with_chunk(struct.pack(">I", 2**31 - 1) + b"teXt"), decodes=False),
    Case("png of unknown chunks", lambda: with_chunk(chunk(b"abCd", b"x" * 999))),
    Case("png with a comment", commented, pixel=RED),
    Case("png of colour type 5", lambda: png(ihdr(64, 48, colour=5), rows(64, 48)), decodes=False),
    Case("png of depth 3", lambda: png(ihdr(64, 48, depth=3), rows(64, 48)), decodes=False),
    Case("png, then a zip", lambda: encoded() + zipped()),
    Case("png, then a script", lambda: encoded() + b"<script>alert(1)</script>"),
    Case("png animated", lambda: animated("PNG"), pixel=RED),
    Case("png of 1 bit", lambda: saved(red("1", 1), "PNG"), pixel=WHITE),
    Case("png of grey", lambda: saved(red("L", 128), "PNG"), pixel=GREY),
    Case("png of 16 bits", lambda: saved(red("I;16", 0x8000), "PNG"), pixel=GREY),
    Case("png of 16 bits without its transparent colour",
         lambda: saved(red("I;16", 0), "PNG", transparency=0x8000), pixel=(0, 0, 0)),
    Case("png of a transparent colour of 4 bits",
         lambda: png(ihdr(64, 48, 4, 0), chunk(b"tRNS", b"\0\1"), rows(32, 48, b"\x11")), pixel=WHITE),
    Case("png of grey and alpha", lambda: saved(red("LA", (0, 0)), "PNG"), pixel=WHITE),
    Case("png of hidden red", lambda: saved(hidden(), "PNG"), pixel=WHITE),
    Case("png of half a red", lambda: saved(red("RGBA", (255, 0, 0, 128)), "PNG"), pixel=(255, 127, 127)),
    Case("png of a palette", palette, pixel=RED),
    Case("png of a transparent palette", lambda: palette(0), pixel=WHITE),
    Case("png of a transparent colour", lambda: saved(red(), "PNG", transparency=(255, 0, 0)), pixel=WHITE),
    Case("png palette without colours", lambda: png(ihdr(64, 48, colour=3), rows(64, 48, b"\7"))),
    Case("png with orientation", lambda: oriented(6, "PNG"), size=(32, 16), pixel=RED),
]  # fmt: skip
JPEGS = [
    Case("jpeg", jpeg),
    Case("jpeg start alone", lambda: b"\xff\xd8\xff", INVALID),
    Case("jpeg cut in its header", lambda: jpeg()[:20], INVALID),
    Case("jpeg cut before its scan", lambda: jpeg()[: jpeg().index(b"\xff\xda")], INVALID),
    Case("jpeg cut in its scan", lambda: jpeg()[: jpeg().index(b"\xff\xda") + 30], decodes=False),
    Case("jpeg of a scan without frame", lambda: b"\xff\xd8\xff\xda\0\2", INVALID),
    Case("jpeg of two frames", lambda: jpeg_of_two_frames(64, 48), INVALID),
    Case("jpeg of a small and a huge frame", lambda: jpeg_of_two_frames(60_000, 60_000), INVALID),
    Case("jpeg of 65000 x 65000", lambda: jpeg_of_size(65_000, 65_000), LARGE),
    Case("jpeg of 0 x 0", lambda: jpeg_of_size(0, 0), INVALID),
    Case("jpeg of some fill bytes", lambda: b"\xff\xd8" + b"\xff" * 100 + jpeg()[2:]),
    Case("jpeg of a million fill bytes", lambda: b"\xff\xd8" + b"\xff" * 1_000_000 + jpeg()[2:], INVALID),
    Case("jpeg of a million segments", lambda: b"\xff\xd8" + b"\xff\xe0\0\2" * 1_000_000 + jpeg()[2:], INVALID),
    Case("jpeg of a segment without length", lambda: b"\xff\xd8\xff\xe0\0\0" + jpeg()[2:], INVALID),
    Case("jpeg progressive", lambda: jpeg(progressive=True)),
    Case("jpeg of thousands of scans", jpeg_of_many_scans, INVALID),
    Case("jpeg of grey", lambda: saved(red("L", 128), "JPEG"), pixel=GREY),
    Case("jpeg of cmyk", lambda: saved(red("CMYK", (0, 0, 0, 127)), "JPEG"), pixel=GREY),
    Case("jpeg of broken exif", lambda: jpeg(exif=b"Exif\0\0MM\0\x2a" + b"\xff" * 60)),
    Case("jpeg of looping exif", lambda: jpeg(exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\x08\0\0\0")),
    Case("jpeg of 60 kB exif", lambda: jpeg(exif=b"Exif\0\0" + bytes(60_000))),
    Case("jpeg of orientation 99", lambda: oriented(99), size=(32, 16), pixel=RED),
    *[Case(f"jpeg of orientation {number}", lambda number=number: oriented(number), size=(32, 16), pixel=RED)
      for number in range(1, 9)],
]  # fmt: skip
WEBPS = [
    Case("webp", webp),
    Case("webp lossless", lambda: webp(lossless=True)),
    Case("webp of alpha", lambda: saved(hidden(), "WEBP", lossless=True), pixel=WHITE),
    Case("webp animated", lambda: animated("WEBP"), pixel=RED),
    Case("webp cut in its header", lambda: webp()[:20], INVALID),
    Case("webp cut in its pixels", lambda: webp()[:60], decodes=False),
    Case("webp of another canvas", lambda: webp_of_size(100, 100), decodes=False),
    Case("webp of a huge canvas", lambda: webp_of_size(16_000, 16_000), LARGE),
    Case("webp of an unknown kind", lambda: b"RIFF\x40\0\0\0WEBPVP9 " + bytes(60), INVALID),
    Case("webp with orientation", lambda: oriented(3, "WEBP"), size=(32, 16), pixel=RED),
]  # fmt: skip
GIFS = [
    Case("gif", lambda: encoded(format="GIF")),
    Case("gif animated", lambda: animated("GIF"), pixel=RED),
    Case("gif of a transparent colour", lambda: saved(hidden(), "GIF"), pixel=WHITE),
    Case("gif cut in its header", lambda: encoded(format="GIF")[:8], INVALID),
    Case("gif cut in its pixels", lambda: saved(Image.effect_noise(SIZE, 90), "GIF")[:1000], decodes=False),
    Case("gif header alone", lambda: gif_of_screen(64, 48)[:13], decodes=False),
    Case("gif of a screen of 0 x 0", lambda: gif_of_screen(0, 0), INVALID),
    Case("gif of a huge screen", lambda: gif_of_screen(60_000, 60_000), LARGE),
    Case("gif of a frame beyond its screen", lambda: gif_of_screen(8, 8), decodes=False),
    Case("gif of a million empty blocks", lambda: gif_with(b"\x21\xfe\0" * 1_000_000)),
    Case("gif of 4 MB of comments", lambda: gif_with(b"\x21\xfe" + (b"\xff" + bytes(255)) * 16_000 + b"\0")),
]  # fmt: skip
AVIFS = [
    Case("avif", avif),
    Case("avif of hidden red", lambda: saved(hidden(), "AVIF"), pixel=WHITE),
    Case("avif animated", lambda: animated("AVIF"), pixel=(254, 0, 0)),
    Case("avif with orientation", lambda: oriented(6, "AVIF"), size=(32, 16)),
    Case("avif brand alone", lambda: b"\0\0\0\x20ftypavif" + bytes(80), INVALID),
    Case("avif cut in its header", lambda: avif()[:200], INVALID),
    Case("avif cut in its pixels", lambda: avif()[:-60], decodes=False),
    Case("avif of junk pixels", avif_of_junk, decodes=False),
    Case("avif of 60000 x 60000", lambda: avif_of_size(60_000, 60_000), LARGE),
    Case("avif of 0 x 0", lambda: avif_of_size(0, 0), INVALID),
    Case("avif of an endless box", lambda: avif().replace(b"\0\0\0\x20ftyp", b"\xff\0\0\x20ftyp"), INVALID),
    Case("avif of a million boxes", lambda: avif()[:32] + b"\0\0\0\x08free" * 1_000_000, INVALID),
    Case("avif without its properties", lambda: avif().replace(b"ipma", b"free"), INVALID),
    Case("avif of another primary item", lambda: avif().replace(b"pitm\0\0\0\0\0\1", b"pitm\0\0\0\0\0\7"), INVALID),
]  # fmt: skip
CASES = [*NOT_IMAGES, *PNGS, *JPEGS, *WEBPS, *GIFS, *AVIFS]
