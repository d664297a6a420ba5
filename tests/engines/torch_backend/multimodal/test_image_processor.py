"""Pixels are those of transformers' CLIPImageProcessor, and no image does harm."""

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile
from transformers import CLIPImageProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from engines import image_decoder as image_decoder
from engines.base import InvalidImage
from engines.image_decoder import decode_image
from engines.torch_backend.models.config import UnsupportedCheckpoint
from engines.torch_backend.multimodal import image_processor as module
from engines.torch_backend.multimodal.image_processor import ImageProcessor, load_image_processor
from tests.factories_images import two_headed_png

SIZE = 32


def make_image(width: int = 50, height: int = 40, mode: str = "RGB", seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 4), dtype=np.uint8)
    smooth = Image.fromarray(pixels, "RGBA").resize((width, height), Image.Resampling.BOX)
    return smooth.convert(mode)


def to_bytes(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def make_settings(**changes: Any) -> dict[str, Any]:
    return {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": SIZE},
        "crop_size": {"height": SIZE, "width": SIZE},
    } | changes


def load(directory: Path, settings: dict[str, Any]) -> ImageProcessor:
    (directory / "preprocessor_config.json").write_text(json.dumps(settings))
    return load_image_processor(directory, SIZE)


def reference(kind: Any, settings: dict[str, Any], data: bytes) -> np.ndarray:
    pil_image = Image.open(io.BytesIO(data))
    return kind(**settings)(pil_image, return_tensors="np")["pixel_values"][0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"size": SIZE, "crop_size": SIZE},
        {"size": {"height": SIZE, "width": SIZE}, "do_center_crop": False},
        {"size": {"height": 20, "width": 45}},
        {"size": {"shortest_edge": 21}},
        {"do_resize": False},
        {"do_normalize": False},
        {"do_rescale": False, "do_normalize": False},
        {"resample": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.25, 0.5]},
        {"rescale_factor": 0.00784313725490196},
    ],
)
@pytest.mark.parametrize("size", [(50, 40), (31, 77), (33, 32), (7, 90), (200, 201)])
def test_pixels_equal_those_of_transformers_bit_by_bit(
    tmp_path: Path, changes: dict[str, Any], size: tuple[int, int]
) -> None:
    settings = make_settings(**changes)
    data = to_bytes(make_image(*size))

    pixels = load(tmp_path, settings).process(decode_image(data))

    expected = reference(CLIPImageProcessorPil, settings, data)
    assert pixels.dtype == np.float32
    np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize("size", [(50, 40), (31, 77)])
def test_pixels_are_near_those_of_the_torchvision_processor(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    """AutoProcessor gives that one; it resizes in its own arithmetic and rounds pixels differently."""
    data = to_bytes(make_image(*size))

    pixels = load(tmp_path, make_settings()).process(decode_image(data))

    expected = reference(CLIPImageProcessor, make_settings(), data)
    assert np.abs(pixels - expected).max() <= 2 / 255 / 0.26
    assert np.abs(pixels - expected).mean() < 1e-3


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "1", "CMYK", "YCbCr"])
def test_every_mode_equals_transformers(tmp_path: Path, mode: str) -> None:
    form = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    data = to_bytes(make_image(mode=mode), form)

    pixels = load(tmp_path, make_settings()).process(decode_image(data))

    expected = reference(CLIPImageProcessorPil, make_settings(), data)
    np.testing.assert_array_equal(pixels, expected)


def as_is(data: bytes) -> np.ndarray:
    """The decoded image itself. Shapes: (H, W, 3)."""
    return np.asarray(decode_image(data))


def black_palette() -> Image.Image:
    image = Image.new("P", (4, 4), 0)
    image.putpalette([0, 0, 0] * 256)
    return image


WHITE, RED, BLUE = (Image.new("RGB", (4, 4), colour) for colour in ("white", "red", "blue"))
FRAMES = to_bytes(RED, "WEBP", save_all=True, append_images=[BLUE], lossless=True)
GREY = Image.fromarray(np.full((4, 4), 0x8000, dtype=np.uint16))


@pytest.mark.parametrize(
    ("data", "colour"),
    [
        pytest.param(to_bytes(Image.new("RGBA", (4, 4), (0, 0, 0, 0))), 255, id="transparency lies on white"),
        pytest.param(to_bytes(black_palette(), transparency=0), 255, id="a transparent palette colour too"),
        pytest.param(to_bytes(GREY), 0x80, id="sixteen bit grey keeps its brightness"),
        pytest.param(to_bytes(WHITE, exif=b"Exif\0\0II*\0\xff\xff\xff\xff"), 255, id="broken metadata spoils nothing"),
        pytest.param(FRAMES, (255, 0, 0), id="the first frame counts"),
    ],
)  # fmt: skip
def test_an_image_looks_as_viewers_show_it(data: bytes, colour: Any) -> None:
    assert as_is(data).shape == (4, 4, 3)
    assert (as_is(data) == colour).all()


def test_an_image_is_turned_as_its_camera_was() -> None:
    pil_image = Image.new("RGB", (4, 8), "white")
    pil_image.paste("black", (0, 0, 4, 4))  # the upper half
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down

    upright = as_is(to_bytes(pil_image, exif=exif))

    assert (upright[:4] == 255).all()
    assert (upright[4:] == 0).all()


@pytest.mark.parametrize("form", ["BMP", "TIFF", "ICO", "PPM"])
def test_other_formats_are_refused(form: str) -> None:
    with pytest.raises(InvalidImage, match="PNG, JPEG, WebP, GIF and AVIF"):
        decode_image(to_bytes(make_image(), form))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "AVIF"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
def test_truncated_images_are_refused_in_fixed_words(form: str, share: float) -> None:
    data = to_bytes(make_image(90, 90), form)

    with pytest.raises(InvalidImage, match=r"^The image cannot be decoded; .* understood\.$"):
        decode_image(data[: int(len(data) * share)])


def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image_decoder, "MAX_PIXELS", 99)

    with pytest.raises(InvalidImage, match="99 pixels"):
        decode_image(to_bytes(make_image(10, 10)))


def test_an_image_of_another_size_than_admitted_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = load(tmp_path, make_settings())
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("was decoded"))
    data = two_headed_png((8, 8), (1, 100_000))

    with pytest.raises(InvalidImage, match="another size than its header"):
        processor.process(decode_image(data, (8, 8)))


def test_an_image_of_the_admitted_size_is_taken_even_if_its_camera_was_turned(
    tmp_path: Path,
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn: upright, it is higher than wide
    data = to_bytes(make_image(50, 40), "JPEG", exif=exif)

    assert load(tmp_path, make_settings()).process(decode_image(data, (50, 40))).shape == (
        3,
        SIZE,
        SIZE,
    )


@pytest.mark.parametrize("size", [(1, 3000), (3000, 1), (3, 7001)])
def test_a_very_long_image_is_never_resized_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    """The middle alone is computed, and is that of the whole."""
    data = to_bytes(make_image(*size))
    exact = load(tmp_path, make_settings(do_normalize=False, do_rescale=False)).process(
        decode_image(data)
    )
    sizes = watch_resizes(monkeypatch)
    monkeypatch.setattr(module, "MAX_RESIZED_PIXELS", 40 * SIZE)

    near = load(tmp_path, make_settings(do_normalize=False, do_rescale=False)).process(
        decode_image(data)
    )

    assert sizes == [(SIZE, SIZE)]
    assert np.abs(near - exact).max() <= 1


def watch_resizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The sizes that images are resized to from now on."""
    sizes: list[tuple[int, int]] = []
    resize = Image.Image.resize

    def note(image: Image.Image, size: tuple[int, int], *args: Any, **options: Any) -> Image.Image:
        sizes.append(size)
        return resize(image, size, *args, **options)

    monkeypatch.setattr(Image.Image, "resize", note)
    return sizes


def test_a_line_of_pixels_does_not_become_a_gigabyte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = watch_resizes(monkeypatch)
    data = to_bytes(Image.new("L", (1, 100_000)))

    tracemalloc.start()
    load(tmp_path, make_settings()).process(decode_image(data))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert max(width * height for width, height in sizes) <= module.MAX_RESIZED_PIXELS
    assert peak < 4 * 2**20  # numpy's share


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image_processor_type": "SiglipImageProcessor"}, "SiglipImageProcessor"),
        ({"do_pad": True}, "do_pad=True"),
        ({"aspect_ratio_setting": "anyres"}, "aspect_ratio_setting"),
        ({"size": {"longest_edge": 9}}, "longest_edge"),
        ({"crop_size": {"height": 8, "width": 8}}, r"\(8, 8\).*32 by 32"),
        ({"image_mean": [0.5]}, "image_mean"),
    ],
)
def test_settings_that_are_not_understood_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load(tmp_path, make_settings(**changes))


def test_settings_may_be_inside_the_processor_config_and_nowhere_else(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"preprocessor_config\.json"):
        load_image_processor(tmp_path, SIZE)
    content = {"processor_class": "LlavaProcessor", "image_processor": make_settings(resample=2)}
    (tmp_path / "processor_config.json").write_text(json.dumps(content))
    assert load_image_processor(tmp_path, SIZE).resample is Image.Resampling.BILINEAR
