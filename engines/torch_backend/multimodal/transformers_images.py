"""Processes images, videos and audio with a checkpoint's transformers processor, one at a time.

The processor provides an item's text in the prompt (`replace_image_token`); the model's own methods compute its
positions. Images are decoded before processing; of a video, only the frames that the processor samples are decoded.
"""

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, SmolVLMProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.processing_utils import OmniModalProcessorMixin
from transformers.video_utils import VideoMetadata

from engines.base import (
    DEFAULT_NUM_FRAMES,
    InvalidImage,
    OpenAudio,
    OpenVideo,
    UnsupportedCheckpoint,
    VideoInfo,
    check_num_frames,
    sample_evenly,
)
from engines.core.runner import NO_LIMITS, PixelLimits
from engines.core.sequence import ImageInput, Positions, Prompt
from engines.packages.checkpoint_json import one_line
from engines.text.processor import Item, MultimodalProcessor
from engines.torch_backend.multimodal.image_masks import INSTEAD, bidirectional_layers
from engines.torch_backend.multimodal.processed import TYPES, ProcessedImage, equal_steps
from engines.torch_backend.multimodal.transformers_audio import find_audio, load_processor, unfit
from shared.protocol import MediaKind


class _Steps(NamedTuple):
    """Temporal steps of a model's videos. They are encoded independently, so long videos can be split into chunks."""

    dim: int = 0  #: dimension of the steps in the pixels
    num_after: int = 0  #: number of features after the last step's features


#: Models whose video input the tests compare with transformers. Videos are refused for other models.
TAKES_VIDEO = {
    "Exaone4_5_ForConditionalGeneration": _Steps(),
    "Gemma4ForConditionalGeneration": _Steps(),
    "Glm46VForConditionalGeneration": _Steps(),
    "Glm4vForConditionalGeneration": _Steps(),
    "Glm4vMoeForConditionalGeneration": _Steps(),
    "InternVLForConditionalGeneration": _Steps(),
    "LlavaNextVideoForConditionalGeneration": _Steps(1),
    "LlavaOnevisionForConditionalGeneration": _Steps(1, num_after=1),
    "MiniCPMV4_6ForConditionalGeneration": _Steps(3),
    "Qwen2VLForConditionalGeneration": _Steps(),
    "Qwen2_5OmniThinkerForConditionalGeneration": _Steps(),
    "Qwen2_5_VLForConditionalGeneration": _Steps(),
    "Qwen3VLForConditionalGeneration": _Steps(),
    "Qwen3VLMoeForConditionalGeneration": _Steps(),
    "Qwen3_5ForConditionalGeneration": _Steps(),
    "Qwen3_5MoeForConditionalGeneration": _Steps(),
    "SmolVLMForConditionalGeneration": _Steps(1),
    "VideoLlama3ForConditionalGeneration": _Steps(),
}
#: Matches the outputs of the image encoder that a model's source code reads. The engine keeps only `_ROWS`.
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
#: Output of processors whose result for an image depends on the other images of the prompt.
_COUNTS = "batch_num_images"


#: Inputs of the position hooks besides grids.
_OF_POSITIONS = frozenset({"feature_attention_mask", "second_per_grid_ts", "video_second_per_grid"})
#: Processors that add start and end tokens around each frame of a video. The chat template adds a pair around the
#: placeholder too, and transformers 5.23 keeps both; models were trained without the outer pair.
_WRITES_AROUND = frozenset({"Qwen3VLProcessor"})
#: Video processors that sample at a rate, up to a number of frames. Other processors accept a rate or a number.
_SAMPLES_AT_RATE = frozenset({"SmolVLMVideoProcessor"})
#: In the training of these models, text after a video began at the video's largest position + 1. In transformers 5.23
#: it begins at the video's first position plus the height or width of the grid (huggingface/transformers #45381).
_BEHIND_VIDEOS = frozenset(
    {"Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"}
)


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

    def positions(self, token_ids: Sequence[int], items: Sequence[ImageInput]) -> Tensor:
        """Shapes: returns (R, N)."""
        ids = torch.tensor([token_ids])
        kwargs: dict[str, Any] = {"attention_mask": torch.ones_like(ids)}
        if items:
            given = [item.pixels for item in items]
            names = dict.fromkeys(name for each in given for name in each.inputs)
            kwargs |= {
                name: torch.cat(
                    [torch.as_tensor(x.inputs[name]) for x in given if name in x.inputs]
                )
                for name in names
                if "grid" in name or name in _OF_POSITIONS
            }
            types = torch.zeros_like(ids)
            for item in items:
                for start, stop in item.slot_runs:
                    types[0, item.offset + start : item.offset + stop] = TYPES[item.pixels.kind]
            kwargs["mm_token_type_ids"] = types
        with self._lock:
            base: Any = getattr(self._model, "model", None)
            if hasattr(base, "rope_deltas"):
                base.rope_deltas = None  # reset the state of an earlier prompt
            positions = self._model._prepare_position_ids_for_generation(ids, kwargs)
            kwargs |= {
                "position_ids": positions, "inputs_embeds": None, "past_key_values": None, "use_cache": False,
            }  # fmt: skip
            made = self._model.prepare_inputs_for_generation(ids, is_first_iteration=True, **kwargs)
        given = made.get("position_ids")
        rows = torch.arange(ids.shape[1]) if given is None else given
        rows = rows.reshape(-1, ids.shape[1])
        if len(rows) == 4:
            text: Any = self._model.config.get_text_config(decoder=True)
            rope = getattr(text, "rope_parameters", None) or {}
            if len(rope.get("mrope_section") or (0, 0, 0)) == 3:
                rows = rows[1:]  # the first row counts text only
        if type(self._model).__name__ in _BEHIND_VIDEOS:
            rows = rows.clone()
            for item in items:
                stop = item.offset + item.num_tokens
                if item.pixels.kind == "video" and stop < rows.shape[1]:
                    rows[:, stop:] += rows[:, :stop].max() + 1 - rows[:, stop].min()
        return rows

    def video_arguments(self) -> frozenset[str]:
        """Arguments of the model's video encoder, which in some models is the image encoder."""
        base = self._model.base_model
        encode = getattr(base, "get_video_features", None) or base.get_image_features
        return frozenset(inspect.signature(encode).parameters)

    @property
    def has_video_encoder(self) -> bool:
        """Whether the model has a video encoder; otherwise frames are encoded as images."""
        return hasattr(self._model.base_model, "get_video_features")

    def encoder_arguments(self) -> Mapping[str, bool]:
        """Arguments of the model's image encoder, and whether they are required.

        Raises: UnsupportedCheckpoint if there is no separate encoder, or the model uses several features per token.
        """
        name, base = type(self._model).__name__, self._model.base_model
        encode = getattr(base, "get_image_features", None)
        if encode is None:
            raise UnsupportedCheckpoint(
                f"{name} has no get_image_features, so it does not turn images into tokens; models with cross "
                f"attention to images are not supported; {INSTEAD}"
            )
        read = _READ.findall(inspect.getsource(type(base).forward))
        if unknown := sorted({*read} - _ROWS):
            raise UnsupportedCheckpoint(
                f"{name} uses {', '.join(unknown)} of its image encoder; only one feature per token is "
                f"supported; {INSTEAD}"
            )
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = inspect.signature(encode).parameters.values()
        return {p.name: p.default is p.empty for p in parameters if p.kind not in kinds}

    def lets_images_see_themselves(self) -> bool:
        """Whether image tokens attend to each other in any layer. Raises: UnsupportedCheckpoint for other masks."""
        return bidirectional_layers(self._model) != frozenset()


class TransformersImages(MultimodalProcessor):
    """Processor of any transformers model with images."""

    def __init__(self, directory: Path, model_class: type[PreTrainedModel], config: Any) -> None:
        self.slot_id = config.image_token_id
        self._processor: Any = load_processor(directory, "image", "image_processor")
        processor = self._processor
        _spell(processor)
        tokenizer = processor.tokenizer
        self._slot: str = tokenizer.convert_ids_to_tokens(self.slot_id)
        ids = getattr(config, "visual_indicator_token_ids", ())
        texts = tokenizer.convert_ids_to_tokens(list(ids))
        if None in texts:
            raise UnsupportedCheckpoint(
                f"the tokenizer lacks a token of visual_indicator_token_ids ({ids} in config.json)"
            )
        self._indicators: dict[str, int] = {text: place for place, text in enumerate(texts)}
        super().__init__(_LAYOUTS.get(type(processor).__name__, ""))
        self.around = getattr(tokenizer, "backend_tokenizer", None)
        self._separator = _separator(processor)
        spelled = (getattr(processor, n, "") for n in ("image_placeholder_token", "image_token"))
        self.placeholder = next(filter(None, spelled), self._slot)
        merged = processor._merge_kwargs(
            tokenizer_init_kwargs=tokenizer.init_kwargs, return_tensors="pt"
        )
        named = inspect.signature(processor._process_images).parameters.values()
        more = {p.name for p in named if p.kind is not p.VAR_KEYWORD} & merged.keys()
        #: options for images, and other required arguments
        self._options = {name: merged[name] for name in more} | merged["images_kwargs"]
        self._hooks = PositionHooks.create(model_class, config)
        self._wanted = self._hooks.encoder_arguments()
        self._are_whole = self._hooks.lets_images_see_themselves()
        self._videos = self._find_videos(model_class, config, merged["videos_kwargs"])
        self._around_videos = ("", "")
        if type(processor).__name__ in _WRITES_AROUND:
            self._around_videos = processor.vision_start_token, processor.vision_end_token
        self.video_placeholder = "" if self._videos is None else self._videos.placeholder
        if self.video_placeholder and isinstance(processor, SmolVLMProcessor):
            self.video_template = processing_smolvlm.DEFAULT_CHAT_TEMPLATE.replace(
                processor.video_token, self.video_placeholder
            )
        has_tower = getattr(config, "audio_config", None) is not None
        self._audios = find_audio(processor, model_class) if has_tower else None
        self.audio_placeholder = "" if self._audios is None else self._audios.placeholder
        self.max_audio_s = 0.0 if self._audios is None else self._audios.max_s

    def _find_videos(
        self, model_class: type[PreTrainedModel], config: Any, options: dict[str, Any]
    ) -> "_Videos | None":
        """The processor of videos; None if there is none, or the model is not in `TAKES_VIDEO`."""
        processor, tokenizer = self._processor, self._processor.tokenizer
        spelled = (getattr(processor, n, "") for n in ("video_placeholder_token", "video_token"))
        placeholder: str = next(filter(None, spelled), "")
        if isinstance(processor, SmolVLMProcessor) and not _is_token(placeholder, tokenizer):
            # published tokenizers lack the video token, so use a token that no template writes
            placeholder = processor.global_image_token
        if (
            model_class.__name__ not in TAKES_VIDEO
            or getattr(processor, "video_processor", None) is None
            or not _is_token(placeholder, tokenizer)
        ):
            return None
        # models without video slots use image slots
        own = getattr(config, "video_token_id", None)
        slots: dict[MediaKind, tuple[str, int]] = {"image": (self._slot, config.image_token_id)}
        if isinstance(own, int) and own != self.slot_id:
            slots = {"video": (tokenizer.convert_ids_to_tokens(own), own), **slots}
        if getattr(processor.video_processor, "cap_pixels_per_frame", 0) is None:
            options["cap_pixels_per_frame"] = False  # explicit, because the default will change
        steps = TAKES_VIDEO[model_class.__name__]
        return _Videos(processor, options, placeholder, slots, self._hooks, steps)

    def process_video(self, video: OpenVideo) -> ProcessedImage:
        return super().process_video(video) if self._videos is None else self._videos.process(video)

    def process_audio(self, audio: OpenAudio) -> ProcessedImage:
        return super().process_audio(audio) if self._audios is None else self._audios.process(audio)

    def limit(self, max_pixels: int) -> None:
        self.max_pixels = max_pixels

    def process(self, image: Image.Image, pixels: PixelLimits = NO_LIMITS) -> ProcessedImage:
        most = min(filter(None, (pixels.most, self.max_pixels)), default=0)
        options = limit_pixels(self._processor, self._options, PixelLimits(pixels.least, most))
        if options is None:  # the processor has no option that limits pixels
            options, image = self._options, PixelLimits(most=most).scale(image)
        alone = self._make(image, [image], options)
        if _COUNTS not in alone.inputs:
            return alone
        # process the image twice in one prompt, and drop the duplicate
        several = self._make(image, [[image, image]], options)
        inputs = {
            name: x if name == _COUNTS or len(x) != 2 else x[:1]
            for name, x in several.inputs.items()
        }
        return replace(alone, among_others=replace(several, inputs=inputs))

    def _make(self, image: Any, images: list[Any], options: Mapping[str, Any]) -> ProcessedImage:
        try:
            made, [text, *_] = self._processor._process_images(images, **options)
        except Exception as error:  # processors raise any type
            raise _unfit(image, one_line(error)) from error
        inputs = {
            name: made[name].contiguous() if isinstance(made[name], Tensor) else made[name]
            for name in made
            if name in self._wanted
        }
        text = str(text)
        spelled = "|".join(map(re.escape, (self._slot, *self._indicators)))
        found = re.findall(spelled, text) if self._indicators else ()
        indicators = tuple(self._indicators.get(each, -1) for each in found)
        num_slots = len(indicators) or text.count(self._slot)
        if num_slots == 0:
            raise _unfit(image, "the image results in no tokens")
        return ProcessedImage(inputs, text, num_slots, indicators=indicators, slot_id=self.slot_id)

    def items(self, images: Sequence[tuple[str, Any]], slot: str) -> list[Item]:
        if sum(image.kind == "image" for _, image in images) > 1:
            images = [
                (name, image)
                if image.among_others is None
                else (f"{name}, among others", image.among_others)
                for name, image in images
            ]
        texts = [image.text for _, image in images]
        processor = self._processor
        if getattr(processor, "default_use_image_id", False):  # images and videos are numbered
            for kind, token in (("image", slot), ("video", self.video_placeholder)):
                places = [i for i, (_, image) in enumerate(images) if image.kind == kind]
                numbered = processor._prepend_local_ids(
                    [token * len(places)], [texts[i] for i in places], token
                )
                for i, text in zip(places, numbered, strict=True):
                    texts[i] = text
        return [
            Item(
                name,
                None,
                image,
                text,
                is_whole=self._are_whole and image.kind != "audio",
                is_filled=bool(self._indicators),
                separator=self._separator,
                kind=image.kind,
                slot_id=image.slot_id,
                around=self._around_videos if image.kind == "video" else ("", ""),
                num_frames=image.num_frames,
            )
            for (name, image), text in zip(images, texts, strict=True)
        ]

    def positions(self, prompt: Prompt) -> Positions:
        """Positions by the model's hooks; () if they are the token indices."""
        hooks = self._hooks
        if not prompt.images and bool((hooks.positions([1, 2], ()) == torch.arange(2)).all()):
            return ()
        rows = hooks.positions(prompt.token_ids, prompt.images)
        counted = torch.arange(rows.shape[1])
        return () if bool((rows == counted).all()) else tuple(map(tuple, rows.tolist()))

    @property
    def image_tokens(self) -> int:
        """Maximum number of slots of an image. Raises: UnsupportedCheckpoint if the processor fails for a sample."""
        name = type(self._processor).__name__
        images = self._processor.image_processor
        try:
            own = _own_area(images)
            area = self.max_pixels or own or _SAMPLE_PIXELS
            most = min(area, own) // (images.patch_size * images.merge_size) ** 2 if own else 0
            # Large images have the most tiles. A size just above the limit can be rounded up.
            areas = min(4 * area, max(area, _LARGEST_SAMPLE)), 1.3 * area
            # Wide and tall images have more tiles, or more rows with a token of their own.
            sizes = [
                (round((each * ratio) ** 0.5), round((each / ratio) ** 0.5))
                for each in areas
                for ratio in _SAMPLE_ASPECTS
            ]
            samples = [self.process(Image.new("RGB", size)) for size in sizes]
        except Exception as error:  # processors raise any type
            raise UnsupportedCheckpoint(
                f"cannot determine the number of tokens of an image: {name} does not process a sample "
                f"({error.__cause__ or error!r}); {INSTEAD}"
            ) from error
        made = samples[0].inputs
        if missing := sorted(n for n, wanted in self._wanted.items() if wanted and n not in made):
            raise UnsupportedCheckpoint(
                f"{name} returns no {', '.join(missing)} for a single image, which the model's image encoder "
                f"requires; {INSTEAD}"
            )
        return max(most, *(sample.num_slots for sample in samples))


@dataclass(eq=False)
class _Videos:
    _processor: Any
    _options: Mapping[str, Any]
    placeholder: str
    #: Texts and ids of slot tokens that a video can have.
    _slots: Mapping[MediaKind, tuple[str, int]]
    _hooks: PositionHooks
    _steps: _Steps

    def process(self, video: OpenVideo) -> ProcessedImage:
        info = video.info
        indices = self._choose(video)
        frames = np.stack([np.asarray(frame) for frame in video.frames(indices)])
        metadata = VideoMetadata(
            info.num_frames, info.fps, info.width, info.height, info.length_s, "pyav", indices
        )
        options = {
            **self._options, "do_sample_frames": False, "return_metadata": True, "video_metadata": [metadata],
        }  # fmt: skip
        if isinstance(self._processor, OmniModalProcessorMixin):
            # the processor assumes two frames per second unless the rate is given
            options = {
                "videos_kwargs": {**options, "fps": metadata.sampled_fps},
                "load_audio_from_video": False,
            }
        try:
            made, [text, *_] = self._processor._process_videos([frames], **options)
        except Exception as error:  # processors raise any type
            raise unfit("video", error) from error
        made, text = dict(made), str(text)
        if not self._hooks.has_video_encoder and "pixel_values_videos" in made:
            made["pixel_values"] = made.pop("pixel_values_videos").flatten(0, 1)
        found: MediaKind | None = next(
            (kind for kind, (slot, _) in self._slots.items() if slot in text), None
        )
        if found is None:
            raise InvalidImage("The model's processor returned no tokens for this video.")
        wanted = self._hooks.video_arguments() | _OF_POSITIONS
        inputs = {
            name: torch.as_tensor(x) if isinstance(x, list | tuple | np.ndarray) else x
            for name, x in made.items()
            if name in wanted
        }
        slot, slot_id = self._slots[found]
        num_slots = text.count(slot)
        grid = inputs.get("video_grid_thw")
        num_frames = len(indices)
        num_steps = num_frames if grid is None else int(grid[0, 0])
        if int(made.get("num_frames_per_video", [num_frames])[0]) != num_frames:
            num_steps = 1  # the processor merged some frames
        kept = made.get("video_compression_mask")
        if kept is not None:
            steps = tuple(kept.view(num_steps, -1).sum(1).tolist())
        elif steps := equal_steps(num_slots - self._steps.num_after, num_steps):
            steps = (*steps[:-1], steps[-1] + self._steps.num_after)
        return ProcessedImage(
            inputs,
            text,
            num_slots,
            kind="video",
            slots_of=found,
            slot_id=slot_id,
            num_frames=num_frames,
            step_slots=steps,
            step_dim=self._steps.dim,
            kept=kept,
        )

    def _choose(self, video: OpenVideo) -> list[int]:
        """Indices of the frames that the processor samples; a single frame is repeated. Raises: InvalidImage."""
        info, asked = video.info, video.options
        processor = self._processor.video_processor
        step = getattr(processor, "temporal_patch_size", 1)
        if info.is_sampled or min(info.num_frames, asked.num_frames or step) < step:
            indices = sample_evenly(video, step)
            return indices + indices[-1:] * (step - len(indices))
        options = {**vars(processor), **self._options}
        named = inspect.signature(processor.sample_frames).parameters.keys()
        indices = list[int]()
        if asked.fps is asked.num_frames is None:
            indices = self._sample(video, self._own_sampling(options, named, info))
        if not 0 < len(indices) <= video.max_frames:
            if "num_frames" in named:
                wanted = self._at_rate(self._wanted_sampling(video, step), info)
                indices = self._sample(video, {**options, **wanted})
            else:  # the processor has no option for the number of frames
                indices = sample_evenly(video, video.max_frames)
                indices += indices[-1:] * (len(indices) % step)
        check_num_frames(len(indices), video)
        return indices

    def _own_sampling(
        self, options: dict[str, Any], named: Collection[str], info: VideoInfo
    ) -> dict[str, Any]:
        """The checkpoint's own number of frames or rate, else the default number."""
        if options.get("num_frames") is not None:
            return {**options, "fps": None}
        if options.get("fps") is not None or not {"fps", "num_frames"} & {*named}:
            return options
        fewer = {**options, "num_frames": min(DEFAULT_NUM_FRAMES, info.num_frames)}
        return self._at_rate(fewer, info)

    def _at_rate(self, options: dict[str, Any], info: VideoInfo) -> dict[str, Any]:
        """Options with which a processor that samples at a rate returns `num_frames` frames."""
        processor = self._processor.video_processor
        if type(processor).__name__ not in _SAMPLES_AT_RATE:
            return options
        rate = options["num_frames"] / info.length_s
        return {**options, "fps": max(processor.fps or 0.0, rate)}

    def _wanted_sampling(self, video: OpenVideo, step: int) -> dict[str, Any]:
        """The request's rate or number of frames; the largest number if it has neither. `step`: the fewest."""
        info, asked = video.info, video.options
        if asked.fps is None:
            return {"fps": None, "num_frames": asked.num_frames or video.max_frames}
        fps = min(asked.fps, info.fps)
        if self._processor.video_processor.num_frames is None:
            return {"fps": fps, "num_frames": None}
        # the processor's own num_frames would take precedence
        return {"fps": None, "num_frames": max(step, round(info.length_s * fps))}

    def _sample(self, video: OpenVideo, options: Mapping[str, Any]) -> list[int]:
        info, processor = video.info, self._processor.video_processor
        metadata = VideoMetadata(
            info.num_frames, info.fps, info.width, info.height, info.length_s, "pyav"
        )
        named = inspect.signature(processor.sample_frames).parameters.keys() - {"metadata"}
        try:
            given = {name: options[name] for name in named if name in options}
            if given.get("num_frames") is not None:  # the processor rounds it to full steps
                step = given.get("temporal_patch_size") or 1
                given["num_frames"] = min(given["num_frames"], info.num_frames // step * step)
            indices = processor.sample_frames(metadata, **given)
        except Exception as error:  # processors raise any type
            raise unfit("video", error) from error
        return [min(int(i), info.num_frames - 1) for i in np.asarray(indices).tolist()]


def _is_token(text: str, tokenizer: Any) -> bool:
    return text in tokenizer.get_added_vocab()


def limit_pixels(
    processor: Any, options: Mapping[str, Any], pixels: PixelLimits
) -> Mapping[str, Any] | None:
    """Options with which the processor scales an image to these limits; None if it has no such option."""
    if pixels == NO_LIMITS:
        return options
    images: Any = processor.image_processor
    least, most = pixels

    def own(name: str) -> Any:
        return options.get(name, getattr(images, name, None))

    def fewer(name: str, pixels_each: int, fewest: int = 1) -> Mapping[str, Any]:
        """Options that limit the number of tiles."""
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
    """Whether a processor's `shortest_edge` and `longest_edge` are areas, as for models that merge patches."""
    return size.keys() == {"shortest_edge", "longest_edge"} and hasattr(images, "merge_size")


def _own_area(images: Any) -> int:
    """Maximum pixels of the images that a processor creates; 0 if it has no such limit."""
    size = {name: side for name, side in dict(images.size or {}).items() if side is not None}
    return size["longest_edge"] if _has_areas(images, size) else 0


def _unfit(image: Image.Image, reason: str) -> InvalidImage:
    return InvalidImage(
        f"The model cannot process an image of {image.width} x {image.height} pixels; send one that is "
        f"neither tiny nor narrow. The processor's error: {reason}"
    )


def _separator(processor: Any) -> str:
    """The token that adjacent images share; empty for most processors."""
    is_it = type(processor).__name__ == "Idefics2Processor"
    return processor.fake_image_token if is_it else ""


def _spell(processor: Any) -> None:
    """Add `replace_image_token` to a processor that builds an image's text only inside `__call__`."""
    if separator := _separator(processor):
        count = 5 if processor.image_processor.do_image_splitting else 1
        text = separator + (processor.image_token * processor.image_seq_len + separator) * count
        processor.replace_image_token = lambda *_, **__: text


_UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """A number below a million in English words, as num2words spells it."""
    if number < 20:
        return _UNITS[number]
    if number < 100:
        ten, unit = divmod(number, 10)
        return _TENS[ten - 2] + (f"-{_UNITS[unit]}" if unit else "")
    size, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    count, rest = divmod(number, size)
    joint = " and " if rest < 100 else ", "
    return f"{in_words(count)} {name}" + (f"{joint}{in_words(rest)}" if rest else "")


_of_smolvlm: Any = processing_smolvlm
_of_smolvlm.num2words = _of_smolvlm.num2words or in_words  # num2words is optional
