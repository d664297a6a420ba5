"""Images at the gateway: headers are read without decoding, base64 is strict, sizes are limited."""

import asyncio
import base64
import hashlib
import io
import struct
import threading
import zlib
from typing import IO, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import gateway.media.loader as loader_module
from gateway.http.errors import InvalidRequest
from gateway.media.loader import ImageRefused, ImageSource, decode_base64, read_header
from shared.protocol import VideoOptions
from tests.factories_images import data_url, encoded, load
from tests.factories_video import clip


@pytest.mark.parametrize("size", [(1, 1), (7, 300), (640, 480), (3000, 17)])
@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("JPEG", {"exif": b"Exif\0\0" + bytes(200)}),
        ("WEBP", {}), ("WEBP", {"lossless": True}), ("WEBP", {"exif": b"Exif\0\0" + bytes(20)}),
        ("GIF", {}), ("AVIF", {"speed": 10}),
    ],
)  # fmt: skip
def test_the_header_matches_the_decoded_image(size, format, options):
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, format, **options)
    header = read_header(buffer.getvalue())
    assert header.media_type == f"image/{format.lower()}"
    assert (header.width, header.height) == size


def test_a_chunk_that_contains_the_name_of_a_header_is_skipped():
    data = encoded()
    body = b"tEXtComment\0IHDR" * 2
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    assert read_header(data[:33] + chunk + data[33:]) == read_header(data)


AVIF = encoded(format="AVIF")[:150]


@given(
    st.binary(max_size=200),
    st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF0000WEBP", b"GIF89a", AVIF, b""]),
)
def test_any_bytes_are_read_or_refused(data, start):
    try:
        header = read_header(start + data)
    except ImageRefused:
        return
    assert header.width >= 0
    assert header.height >= 0


@pytest.mark.parametrize("num_bytes", [786_432, 786_431, 786_433, 2_000_000])
def test_large_base64_is_decoded_in_slices(num_bytes):
    data = bytes(range(256)) * (num_bytes // 256) + bytes(num_bytes % 256)
    assert decode_base64(base64.b64encode(data).decode()) == data


@pytest.mark.parametrize("junk", [" ", "\n", "=", "-", "é", "%3D"])
@pytest.mark.parametrize("where", [0, 1_048_575, 1_048_576, 1_500_000])
def test_junk_is_found_in_any_slice(junk, where):
    text = base64.b64encode(bytes(1_500_000)).decode()
    with pytest.raises(ImageRefused):
        decode_base64(text[:where] + junk + text[where + len(junk) :])


async def test_large_images_are_decoded_off_the_event_loop(monkeypatch):
    decoded_in = []

    def decode(text: str) -> bytes:
        decoded_in.append(threading.current_thread())
        return decode_base64(text)

    monkeypatch.setattr(loader_module, "decode_base64", decode)
    buffer = io.BytesIO()
    Image.effect_noise((700, 700), 100).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    assert len(url) > 256 * 1024
    [image] = await load(ImageSource(url, "p"))
    assert threading.current_thread() not in decoded_in
    assert len(decoded_in) == 1
    assert image.data == buffer.getvalue()
    assert (image.ref.width, image.ref.height) == (700, 700)


async def test_the_bytes_decide_and_not_the_media_type():
    url = data_url(format="JPEG").replace("image/jpeg", "IMAGE/PNG;name=x")
    [image] = await load(ImageSource(url, "p"))
    assert image.ref.media_type == "image/jpeg"


def test_a_gif_is_an_image_even_with_the_sync_bytes_of_mpeg_ts():
    assert loader_module.find_kind(b"GIF89a" + b"G" * 1000) == "image"


class Fetcher:
    """Stands in for `ImageFetcher`: `clip` arrives in pieces, `missing` is refused, and other fetches never end."""

    def __init__(self) -> None:
        self.files: list[IO[bytes]] = []
        self.num_cancelled = 0

    async def fetch(self, url: str, file: IO[bytes], *_: Any) -> None:
        self.files.append(file)
        if "missing" in url:
            raise ImageRefused("no")
        if "clip" in url:
            for start in range(0, len(clip("mp4")), 1000):
                file.write(clip("mp4")[start : start + 1000])
            return
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


async def test_a_refused_image_cancels_the_other_fetches():
    fetcher = Fetcher()
    sources = [ImageSource(f"http://x.example/{name}", name) for name in ("a", "missing", "b")]
    with pytest.raises(InvalidRequest) as raised:
        async with asyncio.timeout(5):
            await load(*sources, fetcher=fetcher)
    assert raised.value.param == "missing"
    assert fetcher.num_cancelled == len(fetcher.files) - 1 >= 1


async def test_a_video_by_url_is_a_file_on_disk_if_the_store_accepts_files():
    fetcher = Fetcher()
    source = ImageSource("http://x.example/clip", "p", video=VideoOptions())
    for uses_disk in (False, True):
        [loaded] = await load(source, fetcher=fetcher, uses_disk=uses_disk)
        assert (loaded.data is fetcher.files[-1]) == uses_disk
        data = loaded.data if isinstance(loaded.data, bytes) else loaded.data.read()  # type: ignore[union-attr]
        loaded.close()
        assert data == clip("mp4")
        assert loaded.ref.sha256 == hashlib.sha256(data).hexdigest()
        assert (loaded.ref.num_bytes, loaded.ref.media_type) == (len(data), "video/mp4")


def jpeg_of_scans(num_scans: int) -> bytes:
    """Returns a progressive JPEG that repeats its last scan, followed by a film that contains such markers too."""
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    start, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    repeated = data[start:end] * (num_scans - data.count(b"\xff\xda"))
    return data[:end] + repeated + data[end:] + b"\xff\xda" * 500


def png_of_chunks(num_chunks: int) -> bytes:
    """Returns a PNG of the header, many small text chunks, and the end of the file."""
    data = encoded()
    body = b"tEXtk\0v"
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return data[:33] + chunk * (num_chunks - 3) + data[33:]


@pytest.mark.parametrize(
    ("make", "most", "reason"),
    [(jpeg_of_scans, 100, "100 scans"), (png_of_chunks, 10_000, "10000 chunks")],
)
def test_an_image_of_too_many_parts_is_refused_with_the_reason(make, most, reason):
    assert read_header(make(most)).width
    with pytest.raises(ImageRefused, match=f"more than {reason}"):
        read_header(make(most + 1))


@given(st.binary(max_size=300))
def test_decoding_inverts_base64(data):
    assert decode_base64(base64.b64encode(data).decode()) == data
