"""Processes images with a checkpoint's transformers processor, one by one.

The processor returns an image's text in the prompt (`replace_image_token`), the model's hooks its positions. Images
are decoded before the processor sees them.
"""

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from threading import Lock
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoProcessor, PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.models.smolvlm import processing_smolvlm

from engines.base import Decode, InvalidImage, UnsupportedCheckpoint
from engines.core.request import Positions, Prompt
from engines.core.runner import NO_LIMITS, PixelLimits
from engines.image_decoder import decode_image
from engines.text.prompt import Item
from engines.torch_backend.multimodal.image_masks import INSTEAD, bidirectional_layers

logger = logging.getLogger(__name__)
#: Outputs of the image encoder that a model's source reads, and that the engine retains.
_READ = re.compile(r"""mm_encoder_outputs(?:\["image"\]|\.get\("image"\))\.(\w+)""")
_ROWS = frozenset({
    "pooler_output", "last_hidden_state", "deepstack_features", "visual_indicator_features",
})  # fmt: skip
#: Prompt formats of processors, for checkpoints without a chat template.
_LAYOUTS = {
    "PaliGemmaProcessor": (
        "{% for m in messages %}{% for c in m['content'] if c['type'] == 'image' %}<image>{% endfor %}{% endfor %}"
        "{{ bos_token }}{% for m in messages %}{% for c in m['content'] if c['type'] == 'text' %}{{ c['text'] }}"
        "{% endfor %}{% endfor %}{{ '\\n' }}"
    )
}
#: Pixels and aspect ratios of the sample images that determine the largest number of tokens per image.
_SAMPLE_PIXELS = 1024 * 1024
_LARGEST_SAMPLE = 8 * _SAMPLE_PIXELS
_SAMPLE_ASPECTS = (1.0, 1.5, 0.66, 2.0, 0.5, 3.0, 0.33)
#: Field of processors that treat an image differently beside others.
_COUNTS = "batch_num_images"


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """The model's inputs for an image, and the image's text in the prompt."""

    inputs: Mapping[str, Any]
    text: str
    num_slots: int
    #: The result if the image is not the only one of its prompt.
    among_others: "ProcessedImage | None" = None
    #: By slot, the index of a shared feature, or -1 for the next row; empty: rows only.
    indicators: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        own = sum(x.nbytes for x in self.inputs.values() if isinstance(x, Tensor))
        return own + (self.among_others.nbytes if self.among_others else 0)


class PositionHooks:
    """Computes a model's positions with its own hooks."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._lock = Lock()  # some hooks store results in the model

    @classmethod
    def create(cls, model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Self:
        """Create the hooks of a model without weights."""
        with torch.device("meta"):
            return cls(model_class(deepcopy(config)))

    def positions(
        self, token_ids: Sequence[int], slot_id: int | None, images: Sequence[ProcessedImage]
    ) -> Tensor:
        """Shapes: returns (R, N)."""
        ids = torch.tensor([token_ids])
        kwargs: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
        if images:
            kwargs |= {name: _joined(images, name) for name in images[0].inputs if "grid" in name}
            kwargs["mm_token_type_ids"] = (ids == slot_id).long()
        with self._lock:
            base: Any = getattr(self._model, "model", None)
            if hasattr(base, "rope_deltas"):
                base.rope_deltas = None  # of an earlier prompt
            positions = self._model._prepare_position_ids_for_generation(ids, kwargs)
            kwargs |= {
                "position_ids": positions, "inputs_embeds": None, "past_key_values": None, "use_cache": False,
            }  # fmt: skip
            made = self._model.prepare_inputs_for_generation(ids, is_first_iteration=True, **kwargs)
        given = made.get("position_ids")
        rows = torch.arange(ids.shape[1]) if given is None else given
        rows = rows.reshape(-1, ids.shape[1])
        return (
            rows[1:] if len(rows) == 4 and self._num_sections() == 3 else rows
        )  # the first one applies

    def _num_sections(self) -> int:
        """Rows of positions."""
        text: Any = self._model.config.get_text_config(decoder=True)
        rope = getattr(text, "rope_parameters", None) or {}
        return len(rope.get("mrope_section") or (0, 0, 0))

    def encoder_arguments(self) -> Mapping[str, bool]:
        """Arguments of the model's image encoder, and whether they are required.

        Raises: UnsupportedCheckpoint for a model without a separate encoder, or that reads more than rows of it.
        """
        name, base = type(self._model).__name__, self._model.base_model
        encode = getattr(base, "get_image_features", None)
        if encode is None:
            raise UnsupportedCheckpoint(
                f"{name} makes no tokens of images: it has no get_image_features, as models have none whose "
                f"layers look at images by cross attention, which is not supported; {INSTEAD}"
            )
        read = _READ.findall(inspect.getsource(type(base).forward))
        if unknown := sorted({*read} - _ROWS):
            raise UnsupportedCheckpoint(
                f"{name} reads {', '.join(unknown)} of an image beside the rows of its slots, which is not "
                f"supported; {INSTEAD}"
            )
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = inspect.signature(encode).parameters.values()
        return {p.name: p.default is p.empty for p in parameters if p.kind not in kinds}

    def lets_images_see_themselves(self) -> bool:
        """Whether images are bidirectional in some layer. Raises: UnsupportedCheckpoint for other masks."""
        return bidirectional_layers(self._model) != frozenset()


def _joined(images: Sequence[ProcessedImage], name: str) -> Tensor:
    return torch.cat([torch.as_tensor(image.inputs[name]) for image in images])


class TransformersImages:
    """Implements `MultimodalProcessor` with any transformers processor."""

    def __init__(self, directory: Path, model_class: type[PreTrainedModel], config: Any) -> None:
        """Raises: UnsupportedCheckpoint."""
        self.slot_id: int = config.image_token_id
        self._processor = _load_processor(directory)
        tokenizer: Any = self._processor.tokenizer  # pyright: ignore
        self._slot: str = tokenizer.convert_ids_to_tokens(self.slot_id)
        ids = getattr(config, "visual_indicator_token_ids", ())
        texts = tokenizer.convert_ids_to_tokens(list(ids))
        if None in texts:
            raise UnsupportedCheckpoint(
                f"the tokenizer lacks tokens of visual_indicator_token_ids, {ids} in config.json"
            )
        self._indicators: dict[str, int] = {text: place for place, text in enumerate(texts)}
        self.template = _LAYOUTS.get(type(self._processor).__name__, "")
        #: The tokenizer's special tokens around a text, which the processor may have changed.
        self.around: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._seam = _seam(self._processor)
        names = ("image_placeholder_token", "image_token")
        spelled = (getattr(self._processor, name, None) for name in names)
        self.placeholder: str = next(filter(None, spelled), self._slot)
        self._options = self._find_options(tokenizer)
        self._hooks = PositionHooks.create(model_class, config)
        self._wanted = self._hooks.encoder_arguments()
        self._are_whole = self._hooks.lets_images_see_themselves()
        self.max_pixels = 0

    def limit(self, max_pixels: int) -> None:
        """Scale larger images down to this number of pixels."""
        self.max_pixels = max_pixels

    @property
    def image_tokens(self) -> int:
        """Largest number of tokens of one image. Raises: UnsupportedCheckpoint."""
        return self._count_tokens()

    def _find_options(self, tokenizer: Any) -> dict[str, Any]:
        """Options of the processor for images, and its other required arguments."""
        merged = self._processor._merge_kwargs(
            tokenizer_init_kwargs=tokenizer.init_kwargs, return_tensors="pt"
        )
        options = merged["images_kwargs"]
        named = inspect.signature(self._processor._process_images).parameters.values()
        more = {p.name for p in named if p.kind is not p.VAR_KEYWORD} & merged.keys()
        return {name: merged[name] for name in more} | options

    def process(
        self,
        data: bytes,
        expected_size: tuple[int, int],
        decode: Decode = decode_image,
        pixels: PixelLimits = NO_LIMITS,
    ) -> ProcessedImage:
        """Raises: InvalidImage."""
        return self._process(decode(data, expected_size), pixels)

    def _process(self, image: Image.Image, pixels: PixelLimits = NO_LIMITS) -> ProcessedImage:
        most = min(filter(None, (pixels.most, self.max_pixels)), default=0)
        options = limit_pixels(self._processor, self._options, PixelLimits(pixels.least, most))
        if options is None:  # it has no such option
            options, image = self._options, _scale(image, most)
        alone = self._make(image, [image], options)
        if _COUNTS not in alone.inputs:
            return alone
        # all images of one prompt; the duplicate is dropped
        several = self._make(image, [[image, image]], options)
        inputs = {
            name: x if name == _COUNTS or len(x) != 2 else x[:1]
            for name, x in several.inputs.items()
        }
        return replace(alone, among_others=replace(several, inputs=inputs))

    def _make(self, image: Any, images: list[Any], options: Mapping[str, Any]) -> ProcessedImage:
        try:
            made, [text, *_] = self._processor._process_images(images, **options)
        except Exception as error:  # of any type
            reason = " ".join(str(error).split())[:200]
            raise _unfit(image, reason) from error
        inputs = {
            name: made[name].contiguous() if isinstance(made[name], Tensor) else made[name]
            for name in made
            if name in self._wanted
        }
        indicators = self._find_indicators(str(text))
        num_slots = len(indicators) or str(text).count(self._slot)
        if num_slots == 0:
            raise _unfit(image, "it comes to no tokens")
        return ProcessedImage(inputs, str(text), num_slots, indicators=indicators)

    def _find_indicators(self, text: str) -> tuple[int, ...]:
        if not self._indicators:
            return ()
        spelled = "|".join(map(re.escape, (self._slot, *self._indicators)))
        return tuple(self._indicators.get(found, -1) for found in re.findall(spelled, text))

    def items(self, images: Sequence[tuple[str, Any]], slot: str) -> list[Item]:
        """The processor's text for each image."""
        if len(images) > 1:
            images = [
                (name, image)
                if image.among_others is None
                else (f"{name}, among others", image.among_others)
                for name, image in images
            ]
        texts = [image.text for _, image in images]
        processor: Any = self._processor
        if getattr(processor, "default_use_image_id", False):
            texts = processor._prepend_local_ids([slot * len(texts)], texts, slot)
        return [
            Item(
                name,
                None,
                image,
                text,
                is_whole=self._are_whole,
                is_filled=bool(self._indicators),
                seam=self._seam,
            )
            for (name, image), text in zip(images, texts, strict=True)
        ]

    def positions(self, prompt: Prompt) -> Positions:
        """Positions by the model's hooks; () if they are the token indices."""
        images = [image.pixels for image in prompt.images]
        if not images and self._counts_text:
            return ()
        rows = self._hooks.positions(prompt.token_ids, self.slot_id, images)
        counted = torch.arange(rows.shape[1])
        return () if bool((rows == counted).all()) else tuple(map(tuple, rows.tolist()))

    @property
    def _counts_text(self) -> bool:
        return bool((self._hooks.positions([1, 2], None, ()) == torch.arange(2)).all())

    def _count_tokens(self) -> int:
        """Slots of a large image. Raises: UnsupportedCheckpoint if the processor cannot process a single image."""
        name = type(self._processor).__name__
        area = self.max_pixels or _own_area(self._processor) or _SAMPLE_PIXELS
        most = _most_slots(self._processor, area)
        # Large images have the most tiles; one just above the limit is rounded up.
        areas = min(4 * area, max(area, _LARGEST_SAMPLE)), 1.3 * area
        # Wide and tall images have more tiles, or more rows with a token of their own.
        sizes = [
            (round((each * ratio) ** 0.5), round((each / ratio) ** 0.5))
            for each in areas
            for ratio in _SAMPLE_ASPECTS
        ]
        try:
            samples = [self._process(Image.new("RGB", size)) for size in sizes]
        except InvalidImage as error:
            raise UnsupportedCheckpoint(
                f"{name} does not say what one image comes to, which the engine has to know "
                f"({error.__cause__!r}); {INSTEAD}"
            ) from error
        made = samples[0].inputs
        if missing := sorted(n for n, wanted in self._wanted.items() if wanted and n not in made):
            raise UnsupportedCheckpoint(
                f"{name} makes no {', '.join(missing)} of one image by itself, which the model's image encoder "
                f"takes: such processors are not supported; {INSTEAD}"
            )
        return max(most, *(sample.num_slots for sample in samples))


def limit_pixels(
    processor: Any, options: Mapping[str, Any], pixels: PixelLimits
) -> Mapping[str, Any] | None:
    """Options under which the processor scales an image to that many pixels; None if there are none."""
    if pixels == NO_LIMITS:
        return options
    images: Any = processor.image_processor
    least, most = pixels

    def own(name: str) -> Any:
        return options.get(name, getattr(images, name, None))

    def fewer(name: str, pixels_each: int, fewest: int = 1) -> Mapping[str, Any]:
        """Options with no more tiles than fit."""
        return (
            {**options, name: max(fewest, min(own(name), most // pixels_each))} if most else options
        )

    size = {name: side for name, side in dict(own("size") or {}).items() if side is not None}
    if _has_areas(images, size):
        longest = min(size["longest_edge"], most) if most else size["longest_edge"]
        shortest = min(max(least or size["shortest_edge"], 1), longest)
        return {**options, "size": {"shortest_edge": shortest, "longest_edge": longest}}
    if own("max_slice_nums") is not None:
        return fewer("max_slice_nums", own("scale_resolution") ** 2)
    if own("max_tiles") is not None:
        return fewer("max_tiles", own("tile_size") ** 2, own("min_tiles"))
    if own("max_patches") is not None:
        if {"height", "width"} <= size.keys():
            return fewer("max_patches", size["height"] * size["width"], own("min_patches") or 1)
        return fewer("max_patches", own("patch_size") ** 2)
    if "longest_edge" in size and most:
        tile = dict(own("max_image_size") or {}).get("longest_edge") or 1
        longest = max(tile, min(size["longest_edge"], isqrt(most) // tile * tile))
        sides = {name: min(side, longest) for name, side in size.items()}
        return {**options, "size": sides}
    if own("image_grid_pinpoints") is not None:
        return None
    return options  # the model resizes all images to one size


def _has_areas(images: Any, size: Mapping[str, int]) -> bool:
    """Whether the edges in a processor's size are areas, as for models that merge patches."""
    return size.keys() == {"shortest_edge", "longest_edge"} and hasattr(images, "merge_size")


def _own_area(processor: Any) -> int:
    """Pixels of the largest image that a processor makes, if it has that limit; else 0."""
    images: Any = processor.image_processor
    size = {name: side for name, side in dict(images.size or {}).items() if side is not None}
    return size["longest_edge"] if _has_areas(images, size) else 0


def _most_slots(processor: Any, area: int) -> int:
    """Patches in an area, for processors of images of any size; else 0."""
    images: Any = processor.image_processor
    own = _own_area(processor)
    return min(area, own) // (images.patch_size * images.merge_size) ** 2 if own else 0


def _scale(image: Image.Image, most: int) -> Image.Image:
    """An image of at most this number of pixels. 0: any."""
    share = (most / (image.width * image.height)) ** 0.5
    if most == 0 or share >= 1:
        return image
    size = (max(1, int(image.width * share)), max(1, int(image.height * share)))
    return image.resize(size, Image.Resampling.BICUBIC)


def _unfit(image: Image.Image, reason: str) -> InvalidImage:
    return InvalidImage(
        f"The model cannot take an image of {image.width} x {image.height} pixels; send one that is "
        f"neither tiny nor narrow. Its processor says: {reason}"
    )


def _seam(processor: Any) -> str:
    """The separator that adjacent images share."""
    is_it = type(processor).__name__ == "Idefics2Processor"
    return processor.fake_image_token if is_it else ""


def _spell(processor: Any) -> None:
    """Make a processor return an image's text that it only builds inside its call."""
    if seam := _seam(processor):
        count = 5 if processor.image_processor.do_image_splitting else 1
        text = seam + (processor.image_token * processor.image_seq_len + seam) * count
        processor.replace_image_token = lambda *_, **__: text


def _load_processor(directory: Path) -> ProcessorMixin:
    smolvlm: Any = processing_smolvlm
    smolvlm.num2words = smolvlm.num2words or str  # required at the start, used for videos only
    try:
        processor = AutoProcessor.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of any type
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedCheckpoint(
            f"transformers cannot load the checkpoint's image processor: {reason}"
        ) from error
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        raise UnsupportedCheckpoint("the checkpoint has no image processor beside its tokenizer")
    _spell(processor)
    return processor
