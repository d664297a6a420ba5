"""Converts images to pixels, exactly like transformers' CLIPImageProcessor (PIL).

Called from a thread pool. Pixels are numpy arrays (3, H, W) of float32.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from engines.packages.checkpoint_json import Fields, read_json, shown
from engines.torch_backend.models.config import MAX_IMAGE_SIZE, UnsupportedCheckpoint

#: Of a larger resized image, only the crop is created. With a short side of 336, aspect ratios above 37 exceed this.
MAX_RESIZED_PIXELS = 4 * 1024 * 1024
_FILTER_REACH = 4  # source pixels on either side; Lanczos, the widest filter, reads 3
_KNOWN_KINDS = ("CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPFeatureExtractor")
#: Supported settings, and settings that do not affect pixels.
_KNOWN_KEYS = frozenset(
    [
        "image_processor_type",
        "feature_extractor_type",
        "processor_class",
        "_valid_processor_keys",
        "data_format",
        "input_data_format",
        "device",
        "return_tensors",
        "disable_grouping",
        "default_to_square",
        "image_seq_length",
        "_processor_class",
        "auto_map",
        "backend",
        "pad_size",
        "antialias",
        "do_convert_rgb",
        "do_resize",
        "size",
        "resample",
        "do_center_crop",
        "crop_size",
        "do_rescale",
        "rescale_factor",
        "do_normalize",
        "image_mean",
        "image_std",
    ]
)


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """Resize, crop, rescale, normalize. Units: `shortest_edge`, `resize_to` and `crop_to` in pixels."""

    resize_to: tuple[int, int] | None  #: (height, width); None: `shortest_edge` applies
    shortest_edge: int | None  #: if this and `resize_to` are None, images are not resized
    resample: Image.Resampling
    crop_to: tuple[int, int] | None
    rescale_factor: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    def process(self, image: Image.Image) -> np.ndarray:
        """Shapes: returns (3, H, W) float32."""
        pixels = np.asarray(self._resize(image)).transpose(2, 0, 1)
        if self.crop_to is not None:
            pixels = pad(pixels, self.crop_to)
        return self._normalize(pixels)

    def _resize(self, image: Image.Image) -> Image.Image:
        """The part of the resized image inside the crop; smaller than the crop if it must be padded."""
        height, width = self._target_size(image)
        crop_height, crop_width = self.crop_to or (height, width)
        left, right = _middle(width, crop_width)
        top, bottom = _middle(height, crop_height)
        if width * height <= MAX_RESIZED_PIXELS or (width, height) == image.size:
            if (width, height) != image.size:
                image = image.resize((width, height), self.resample)
            return image.crop((left, top, right, bottom))
        # Resize only the source of the crop. Pillow's float32 box is exact enough near the origin.
        first_x, last_x, box_left, box_right = _source(left, right, width, image.width)
        first_y, last_y, box_top, box_bottom = _source(top, bottom, height, image.height)
        part = image.crop((first_x, first_y, last_x, last_y))
        box = (box_left, box_top, box_right, box_bottom)
        return part.resize((right - left, bottom - top), self.resample, box)

    def _target_size(self, image: Image.Image) -> tuple[int, int]:
        if self.resize_to is not None:
            return self.resize_to
        if self.shortest_edge is None:
            return image.height, image.width
        short, long = sorted((image.width, image.height))
        longer = int(self.shortest_edge * long / short)
        if image.width <= image.height:
            return longer, self.shortest_edge
        return self.shortest_edge, longer

    def _normalize(self, pixels: np.ndarray) -> np.ndarray:
        if self.rescale_factor is not None:  # in float64, like transformers
            scaled = (pixels.astype(np.float64) * self.rescale_factor).astype(np.float32)
        else:
            scaled = pixels.astype(np.float32)
        if self.mean is not None and self.std is not None:
            mean = np.array(self.mean, dtype=np.float32)[:, None, None]
            scaled = (scaled - mean) / np.array(self.std, dtype=np.float32)[:, None, None]
        return np.ascontiguousarray(scaled)


def _middle(length: int, kept: int) -> tuple[int, int]:
    """Bounds of a centered crop of a side; the complete side if it is shorter."""
    start = max(0, (length - kept) // 2)
    return start, min(start + kept, length)


def _source(start: int, stop: int, target: int, length: int) -> tuple[int, int, float, float]:
    """Source pixels of a part of the resized side, and the bounds of the part within them."""
    scale = length / target
    reach = _FILTER_REACH * max(scale, 1.0)
    first = max(0, math.floor(start * scale - reach))
    last = min(length, math.ceil(stop * scale + reach))
    return first, last, start * scale - first, min(stop * scale, length) - first


def pad(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Pad with black to a size; an odd pixel is added at the start. Shapes: (3, H, W); returns (3, *size)."""
    height, width = pixels.shape[1:]
    if (height, width) == size:
        return pixels
    top, left = (size[0] - height + 1) // 2, (size[1] - width + 1) // 2
    bottom, right = size[0] - height - top, size[1] - width - left
    return np.pad(pixels, ((0, 0), (top, bottom), (left, right)))


def load_image_processor(directory: Path, image_size: int) -> ImageProcessor:
    """Read a checkpoint's settings. Raises: UnsupportedCheckpoint, with the name of the unsupported setting."""
    settings = read_json(directory / "preprocessor_config.json")
    if not settings.values:  # transformers 5 saves them inside the processor's settings
        settings = read_json(directory / "processor_config.json").section("image_processor")
    if not settings.values:
        raise UnsupportedCheckpoint("the checkpoint has no preprocessor_config.json")
    kind = settings.get(
        "image_processor_type", settings.get("feature_extractor_type", _KNOWN_KINDS[0])
    )
    if kind not in _KNOWN_KINDS:
        raise UnsupportedCheckpoint(
            f"{settings.file}: the image processor {shown(kind)} is not supported, only CLIPImageProcessor"
        )
    for key, value in settings.values.items():
        if key not in _KNOWN_KEYS and value not in (None, False):
            raise UnsupportedCheckpoint(
                f"{settings.file}: the setting {key[:80]}={shown(value)} is unknown"
            )
    height_width, shortest_edge = _resize_size(settings)
    rescales, normalizes = settings.flag("do_rescale", True), settings.flag("do_normalize", True)
    factor = settings.number("rescale_factor", 1 / 255, above=0, at_most=1e3)
    processor = ImageProcessor(
        resize_to=height_width,
        shortest_edge=shortest_edge,
        resample=Image.Resampling(
            settings.whole("resample", int(Image.Resampling.BICUBIC), at_least=0, at_most=5)
        ),
        crop_to=_crop_size(settings),
        rescale_factor=factor if rescales else None,
        mean=_channels(settings, "image_mean", OPENAI_CLIP_MEAN, above=-1e6)
        if normalizes
        else None,
        std=_channels(settings, "image_std", OPENAI_CLIP_STD, above=0) if normalizes else None,
    )
    made = processor.crop_to or processor.resize_to
    if made != (image_size, image_size):
        raise UnsupportedCheckpoint(
            f"{settings.file}: images are resized to {made or 'any size'}, but the vision tower "
            f"requires {image_size} by {image_size}"
        )
    return processor


def _resize_size(settings: Fields) -> tuple[tuple[int, int] | None, int | None]:
    """(height, width), or the shortest edge, as in `size`; two None without `do_resize`."""
    if not settings.flag("do_resize", True):
        return None, None
    size = settings.get("size", {"shortest_edge": 224})
    if not isinstance(size, dict):
        return None, settings.whole("size", at_most=MAX_IMAGE_SIZE)
    if set(size) == {"shortest_edge"}:
        return None, settings.section("size").whole("shortest_edge", 224, at_most=MAX_IMAGE_SIZE)
    return _height_width(settings, "size"), None


def _crop_size(settings: Fields) -> tuple[int, int] | None:
    if not settings.flag("do_center_crop", True):
        return None
    if isinstance(settings.get("crop_size"), dict):
        return _height_width(settings, "crop_size")
    side = settings.whole("crop_size", 224, at_most=MAX_IMAGE_SIZE)
    return side, side


def _height_width(settings: Fields, name: str) -> tuple[int, int]:
    size = settings.section(name)
    if set(size.values) != {"height", "width"}:
        raise settings.refuse(name, f"{shown(settings.get(name))} is not a height and a width")
    height, width = (size.whole(key, 0, at_most=MAX_IMAGE_SIZE) for key in ("height", "width"))
    return height, width


def _channels(settings: Fields, key: str, default: list[float], above: float) -> tuple[float, ...]:
    value = settings.get(key, default)
    values = value if isinstance(value, list | tuple) else (value,) * 3
    if len(values) != 3:
        raise settings.refuse(key, f"has {len(values)} channels, not 3")
    return tuple(settings.check_number(key, item, above, 1e6) for item in values)
