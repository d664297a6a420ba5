"""Pixels equal those of transformers' CLIPImageProcessor, and hostile images are refused."""

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
def test_pixels_equal_those_of_transformers_bit_by_bit(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = make_settings(**changes)
    processor = load(tmp_path, settings)
    for size in ((50, 40), (31, 77), (33, 32), (7, 90), (200, 201)):
        data = to_bytes(make_image(*size))
        pixels = processor.process(decode_image(data))
        assert pixels.dtype == np.float32
        np.testing.assert_array_equal(pixels, reference(CLIPImageProcessorPil, settings, data))


@pytest.mark.parametrize("mode", ["RGB", "L", "LA", "P", "RGBA", "1", "CMYK", "YCbCr"])
def test_every_mode_equals_transformers(tmp_path: Path, mode: str) -> None:
    form = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    data = to_bytes(make_image(mode=mode), form)

    pixels = load(tmp_path, make_settings()).process(decode_image(data))

    expected = reference(CLIPImageProcessorPil, make_settings(), data)
    np.testing.assert_array_equal(pixels, expected)
    if mode == "RGB":  # AutoProcessor's class resizes and rounds pixels differently
        near = reference(CLIPImageProcessor, make_settings(), data)
        assert np.abs(pixels - near).max() <= 2 / 255 / 0.26
        assert np.abs(pixels - near).mean() < 1e-3


def test_an_image_with_too_many_pixels_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image_decoder, "MAX_PIXELS", 99)

    with pytest.raises(InvalidImage, match="99 pixels"):
        decode_image(to_bytes(make_image(10, 10)))


def test_an_image_of_another_size_than_admitted_is_refused_before_it_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("was decoded"))
    data = two_headed_png((8, 8), (1, 100_000))

    with pytest.raises(InvalidImage, match="differs from its header"):
        decode_image(data, (8, 8))


def test_a_very_long_image_is_never_resized_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the center is computed, and equals that of the whole; a one-pixel line does not become a gigabyte."""
    processor = load(tmp_path, make_settings(do_normalize=False, do_rescale=False))
    sizes: list[tuple[int, int]] = []
    resize = Image.Image.resize

    def note(image: Image.Image, size: tuple[int, int], *args: Any, **options: Any) -> Image.Image:
        sizes.append(size)
        return resize(image, size, *args, **options)

    monkeypatch.setattr(Image.Image, "resize", note)
    for size in ((1, 3000), (3000, 1), (3, 7001)):
        image = decode_image(to_bytes(make_image(*size)))
        exact = processor.process(image)
        with monkeypatch.context() as patch:
            patch.setattr(module, "MAX_RESIZED_PIXELS", 40 * SIZE)
            near = processor.process(image)
        assert sizes[-1] == (SIZE, SIZE)
        assert np.abs(near - exact).max() <= 1

    sizes.clear()
    line = decode_image(to_bytes(Image.new("L", (1, 100_000))))
    tracemalloc.start()
    processor.process(line)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert max(width * height for width, height in sizes) <= module.MAX_RESIZED_PIXELS
    assert peak < 4 * 2**20  # the memory of numpy


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
def test_unsupported_settings_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load(tmp_path, make_settings(**changes))


def test_settings_can_be_inside_the_processor_config(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"preprocessor_config\.json"):
        load_image_processor(tmp_path, SIZE)
    content = {"processor_class": "LlavaProcessor", "image_processor": make_settings(resample=2)}
    (tmp_path / "processor_config.json").write_text(json.dumps(content))
    assert load_image_processor(tmp_path, SIZE).resample is Image.Resampling.BILINEAR
