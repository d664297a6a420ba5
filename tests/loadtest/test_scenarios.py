"""What is asked: the same for the same seed, new pictures that are new, and real JPEGs."""

import base64
import io
import random

import pytest
from PIL import Image

from loadtest.pictures import DATA_URL, NumberedUrls, noise_jpeg, numbered, to_data_url
from loadtest.scenarios import Picture, RepeatedPicture, Text, to_body


def pixels(jpeg: bytes) -> bytes:
    with Image.open(io.BytesIO(jpeg)) as image:
        return image.convert("RGB").tobytes()


def picture_url(content: list[dict]) -> str:
    return content[0]["image_url"]["url"]


@pytest.mark.parametrize("num_bytes", [4_000, 60_000])
def test_noise_has_about_the_size_that_was_asked_for(num_bytes):
    assert num_bytes <= len(noise_jpeg(num_bytes)) < 1.25 * num_bytes


def test_noise_is_the_same_for_the_same_seed_only():
    assert noise_jpeg(2_000, seed=1) == noise_jpeg(2_000, seed=1) != noise_jpeg(2_000, seed=2)


def test_number_changes_the_bytes_and_no_pixel():
    jpeg = noise_jpeg(2_000)
    first, second = numbered(jpeg, 1), numbered(jpeg, 2)
    assert len({jpeg, first, second}) == 3
    assert pixels(first) == pixels(second) == pixels(jpeg)


def test_numbered_url_is_that_of_the_numbered_picture():
    jpeg = noise_jpeg(2_000)
    assert NumberedUrls(jpeg).url(10**12 - 1) == to_data_url(numbered(jpeg, 10**12 - 1))


@pytest.mark.parametrize(
    "create", [Text, lambda: Picture(2_000, 0), lambda: RepeatedPicture(2_000, 0)]
)
def test_same_seed_asks_the_same(create):
    first, second = random.Random(5), random.Random(5)
    assert [create().content(first) for _ in range(5)] == [
        create().content(second) for _ in range(5)
    ]


def test_new_pictures_are_all_different_and_repeated_ones_are_not():
    draw = random.Random(0)
    new, repeated = Picture(2_000, 0), RepeatedPicture(2_000, 0)
    assert len({picture_url(new.content(draw)) for _ in range(50)}) == 50
    assert len({picture_url(repeated.content(draw)) for _ in range(50)}) == 1
    url = picture_url(new.content(draw))
    assert pixels(base64.b64decode(url.removeprefix(DATA_URL)))


def test_stream_asks_for_its_usage():
    assert to_body("m", [], 4, stream=True)["stream_options"] == {"include_usage": True}
    assert "stream" not in to_body("m", [], 4, stream=False)
