"""Families that take videos and audio, with small files, and what transformers makes of the same files."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata

from engines.base import DEFAULT_NUM_FRAMES
from engines.core.sequence import Prompt
from engines.image_decoder import decode_image
from engines.text.processor import ChatProcessor
from engines.torch_backend.multimodal.transformers_images import _BEHIND_VIDEOS
from shared.protocol import ChatMessage, ImagePart, ImageRef, TextPart, VideoOptions
from shared.settings.limits import LimitSettings
from tests.contract.test_model_family import make_image
from tests.engines.torch_backend.models import test_families
from tests.engines.torch_backend.models.family_table import (
    Family,
    named,
    sub,
    tokenizer,
    visual,
    write_checkpoint,
)
from tests.engines.torch_backend.models.test_families import Loaded, load, make_request
from tests.factories_audio import SOUNDS, sound
from tests.factories_tekken import make_tekken
from tests.factories_video import CLIPS, av, clip
from worker.prepare.video_pool import VideoPool

RATE = 16_000
#: Strings are texts and names of files; numbers are seeds of images.
Question = list[str | int]


def video_row(name: str, placeholder: str, settings: dict[str, Any], **more: Any) -> Family:
    """A family of the table, with a processor of small videos."""
    family = replace(named(name), video_placeholder=placeholder, **more)
    create: Any = family.create_processor

    def create_small() -> Any:
        processor = create()
        for field, value in settings.items():
            setattr(processor.video_processor, field, value)
        return processor

    return replace(family, create_processor=create_small)


def smolvlm_processor(*more: str) -> Any:
    made: Any = named("SmolVLM").create_processor()  # type: ignore[misc]
    made.tokenizer.add_special_tokens({"additional_special_tokens": list(more)})
    return made


def _next_config() -> Any:
    config: Any = named("LLaVA-NeXT-Video").create()
    config.vision_config.image_size = 56
    config.video_token_id = 302
    return config


def _qwen25_processor() -> Any:
    made = named("Qwen2.5-VL").create_processor()  # type: ignore[misc]
    return transformers.Qwen2_5_VLProcessor(
        made.image_processor, made.tokenizer, made.video_processor
    )


_QWEN: dict[str, Any] = {
    "patch_size": 14, "max_frames": 16, "min_frames": 2, "min_pixels": 784, "max_pixels": 784 * 6,
    "size": {"shortest_edge": 784 * 2, "longest_edge": 784 * 12 * 8},
}  # fmt: skip
_GLM = {"size": {"shortest_edge": 784 * 2, "longest_edge": 784 * 12 * 4}}
_SQUARE = {"size": {"height": 28, "width": 28}, "num_frames": 8}
_GEMMA = {"patch_size": 7, "pooling_kernel_size": 2, "max_soft_tokens": 70, "num_frames": 3}
#: It leaves out the first and the last second of the longest clip.
SMOLVLM = {
    "size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}, "num_frames": 3, "fps": 1,
}  # fmt: skip
RUN = "<|vision_start|><|video_pad|><|vision_end|>"
_GLM_RUN = "<|begin_of_video|><|video|><|end_of_video|>"
VIDEO_FAMILIES = [
    video_row("Qwen2-VL", RUN, _QWEN),
    video_row("Qwen2.5-VL", RUN, _QWEN, create_processor=_qwen25_processor),
    video_row("Qwen2.5-Omni", "<|vision_bos|><|VIDEO|><|vision_eos|>", {"num_frames": 4}),
    *(video_row(name, "<|video_pad|>", _QWEN) for name in ("Qwen3-VL", "Qwen3-VL-MoE", "Qwen3.5", "Qwen3.5-MoE")),
    video_row("EXAONE 4.5", RUN, _QWEN),
    *(video_row(name, "<video>", _SQUARE) for name in ("LLaVA-OneVision", "InternVL 3", "InternVL 2.5")),
    *(video_row(name, _GLM_RUN, _GLM) for name in ("GLM-4.1V", "GLM-4.5V", "GLM-4.6V")),
    *(video_row(name, "<|video|>", _GEMMA) for name in ("Gemma 4", "Gemma 4 E")),
    video_row("MiniCPM-V 4.6", "<video_pad>", {"patch_size": 7, "scale_resolution": 56, "max_slice_nums": 1}),
    video_row(
        "VideoLLaMA 3", "<|video_pad|>",
        {"patch_size": 14, "num_frames": 6, "size": {"shortest_edge": 784, "longest_edge": 784 * 6}},
    ),
    video_row(
        "LLaVA-NeXT-Video", "<video>",
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "num_frames": 6},
        create=_next_config,
    ),
    video_row("SmolVLM", "<video>", SMOLVLM, create_processor=lambda: smolvlm_processor("<video>")),
]  # fmt: skip


def named_video(name: str) -> Family:
    [family] = [each for each in VIDEO_FAMILIES if each.name == name]
    return family


def _whisper() -> Any:
    return transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=4)


class _VoxtralFiles:
    """What is published beside Voxtral's weights: no tokenizer.json, and no chat template."""

    def save_pretrained(self, directory: Path) -> None:
        transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(directory)
        (directory / "tekken.json").write_text(json.dumps(make_tekken()))


def _read_voxtral(processor: Any, audio: list[Any], text: str) -> dict[str, Any]:
    """Its processor leaves prompts to mistral-common."""
    text = "<s>[INST]" + text.replace("[AUDIO]", "[AUDIO]" * 375) + "[/INST]"
    made = dict(processor.tokenizer([text], add_special_tokens=False, return_tensors="pt"))
    if audio:
        made["input_features"] = processor._retrieve_input_features(audio, **processor.audio_kwargs)
    return made


def _audio(family: Family, class_name: str, placeholder: str, **more: Any) -> Family:
    class_name = f"{class_name}ForConditionalGeneration"
    return replace(family, class_name=class_name, audio_placeholder=placeholder, **more)


def _gemma4_config() -> Any:
    config = named("Gemma 4 E").create().to_dict()
    config["audio_config"] = {
        "model_type": "gemma4_audio", "use_clipped_linears": False, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "output_proj_dims": 48, "subsampling_conv_channels": [128, 4], "conv_kernel_size": 3,
        "attention_chunk_size": 4, "attention_context_left": 5,
    }  # fmt: skip
    return transformers.Gemma4Config(**config)


TOWER: dict[str, Any] = {
    "d_model": 32, "hidden_size": 32, "encoder_layers": 2, "num_hidden_layers": 2, "encoder_attention_heads": 2,
    "num_attention_heads": 2, "encoder_ffn_dim": 48, "intermediate_size": 48, "num_mel_bins": 80,
    "max_source_positions": 200,
}  # fmt: skip
_QWEN2_AUDIO = visual(
    "Qwen2-Audio", "",
    lambda: transformers.Qwen2AudioProcessor(_whisper(), tokenizer("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")),
    "Qwen2Audio",
    audio_config={**TOWER, "model_type": "qwen2_audio_encoder"},
    text_config=sub("qwen2"), audio_token_id=302, audio_token_index=302,
)  # fmt: skip
_GLM_ASR = visual(
    "GLM-ASR", "",
    lambda: transformers.GlmAsrProcessor(_whisper(), tokenizer("<|audio|>"), audio_token="<|audio|>", max_audio_len=40),
    "GlmAsr",
    audio_config={
        **TOWER, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 200,
    },
    text_config=sub("llama"), audio_token_id=302,
)  # fmt: skip
_FLAMINGO = visual(
    "Audio Flamingo 3", "",
    lambda: transformers.AudioFlamingo3Processor(_whisper(), tokenizer("<sound>"), max_audio_len=40),
    "AudioFlamingo3", audio_config=TOWER, text_config=sub("qwen2"), audio_token_id=302,
)  # fmt: skip
_VOXTRAL = visual(
    "Voxtral", "", _VoxtralFiles, "Voxtral",
    audio_config={
        "model_type": "voxtral_encoder", "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_mel_bins": 80,
    },
    text_config=sub("llama", head_dim=16, max_position_embeddings=2048), audio_token_id=24, read=_read_voxtral,
)  # fmt: skip
AUDIO_FAMILIES = [
    _audio(_QWEN2_AUDIO, "Qwen2Audio", "<|audio_bos|><|AUDIO|><|audio_eos|>"),
    _audio(_GLM_ASR, "GlmAsr", "<|audio|>"),
    _audio(_FLAMINGO, "AudioFlamingo3", "<sound>"),
    _audio(named("Gemma 4 E"), "Gemma4", "<|audio|>", create=_gemma4_config),
    _audio(named("Qwen2.5-Omni"), "Qwen2_5OmniThinker", "<|audio_bos|><|AUDIO|><|audio_eos|>"),
    _audio(_VOXTRAL, "Voxtral", "[BEGIN_AUDIO][AUDIO]"),
    _audio(named("Gemma 3n"), "Gemma3n", "<audio_soft_token>"),
]


def named_audio(name: str) -> Family:
    [family] = [each for each in AUDIO_FAMILIES if each.name == name]
    return family


@pytest.fixture(scope="module")
def pool() -> Iterator[VideoPool]:
    pool = VideoPool(1, LimitSettings())
    yield pool
    pool.close()


def process_video(
    pool: VideoPool, processor: ChatProcessor, name: str, **options: Any
) -> tuple[tuple[int, ...], Any]:
    data = clip(name)
    ref = ImageRef("", len(data), CLIPS[name][1], 0, 0, video=VideoOptions(**options))
    with pool.open(io.BytesIO(data), ref) as video:
        made = processor.process_video(video)
        assert video.indices is not None
        return video.indices, made


def process_audio(
    pool: VideoPool, processor: ChatProcessor, data: bytes, media_type: str = "audio/wav"
) -> Any:
    ref = ImageRef("", len(data), media_type, 0, 0)
    with pool.open_audio(io.BytesIO(data), ref) as audio:
        return processor.process_audio(audio)


def samples_of(pool: VideoPool, name: str) -> np.ndarray:
    data = sound(name)
    with pool.open_audio(
        io.BytesIO(data), ImageRef("", len(data), SOUNDS[name][1], 0, 0)
    ) as opened:
        return np.frombuffer(opened.samples(RATE), np.float32).copy()


def read(pool: VideoPool, processor: ChatProcessor, part: str | int) -> Any:
    """A file that is made ready for the model."""
    if isinstance(part, int):
        return processor.process_image(decode_image(make_image(28, 28, part)))
    if part in CLIPS:
        return process_video(pool, processor, part)[1]
    return process_audio(pool, processor, sound(part), SOUNDS[part][1])


def ask(pool: VideoPool, processor: ChatProcessor, question: Question) -> Prompt:
    parts: list[TextPart | ImagePart] = []
    media: list[tuple[str, Any]] = []
    for part in question:
        if isinstance(part, str) and part not in CLIPS and part not in SOUNDS:
            parts.append(TextPart(part))
        else:
            parts.append(ImagePart(len(media)))
            media.append((f"{part}", read(pool, processor, part)))
    return processor.build_prompt([ChatMessage("user", tuple(parts))], media)


def whole(name: str) -> tuple[np.ndarray, VideoMetadata]:
    """All frames of a clip, decoded in this process, upright and in even steps, with what transformers must know."""
    with av.open(io.BytesIO(clip(name))) as container:
        decoded = list(container.decode(video=0))
    turns = (decoded[0].rotation // 90) % 4
    frames = np.stack([np.rot90(frame.to_ndarray(format="rgb24"), turns) for frame in decoded])
    length_s = len(frames) / 25
    if name == "variable":
        times = np.array([frame.time for frame in decoded])
        length_s = float(times[-1] + decoded[-1].duration * decoded[-1].time_base)
        steps = np.arange(len(frames)) * length_s / len(frames)
        frames = frames[np.searchsorted(times, steps + 1e-4, side="right") - 1]
    fps, (height, width) = len(frames) / length_s, frames.shape[1:3]
    return frames, VideoMetadata(len(frames), fps, width, height, length_s, "pyav")


def their_inputs(
    family: Family, directory: Path, pool: VideoPool, question: Question, prompt: Prompt
) -> dict[str, Any]:
    """What transformers' processor makes of the same files: of whole videos, which it samples by itself."""
    processor: Any = AutoProcessor.from_pretrained(directory)
    text = family.opening
    images, videos, audio, metadata = [], [], [], []
    for part in question:
        if isinstance(part, int):
            text += family.placeholder
            images.append(Image.open(io.BytesIO(make_image(28, 28, part))))
        elif part in CLIPS:
            text += family.video_placeholder
            frames, about = whole(part)
            videos.append(frames)
            metadata.append(about)
        elif part in SOUNDS:
            text += family.audio_placeholder
            audio.append(samples_of(pool, part))
        else:
            text += part
    given: dict[str, Any] = {"images": images, "videos": videos, "audio": audio}
    options = {name: files for name, files in given.items() if files}
    if videos:
        options |= {"video_metadata": metadata, **_sampling(processor, videos[0])}
    if family.read is not None:
        made = dict(family.read(processor, audio, text))
    else:
        made = dict(processor(text=[text + "\n"], return_tensors="pt", **options))
    assert made.pop("input_ids")[0].tolist() == prompt.token_ids
    if "video_second_per_grid" in made:  # it assumes two frames a second
        steps = made["video_grid_thw"][:, 0].tolist()
        lengths = [about.duration or 0.0 for about in metadata]
        made["video_second_per_grid"] = torch.tensor(lengths) / torch.tensor(steps)
    return {
        name: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in made.items()
    }


def _sampling(processor: Any, frames: np.ndarray) -> dict[str, Any]:
    """Options with which transformers' processor samples frames as ours does."""
    own = processor.video_processor
    if own.num_frames and own.fps:
        return {"do_sample_frames": True, "num_frames": own.num_frames, "fps": None}
    if own.num_frames or own.fps or hasattr(own, "max_num_frames"):
        return {"do_sample_frames": True}
    return {"do_sample_frames": True, "num_frames": min(DEFAULT_NUM_FRAMES, len(frames))}


@torch.inference_mode()
def _generate_at(model: Any, prompt: Prompt, inputs: dict[str, Any]) -> list[int]:
    """Greedy tokens of transformers' forward pass at the prompt's positions, all computed anew for each."""
    ids = list(prompt.token_ids)
    rows = torch.tensor(prompt.positions)
    given = {n: x for n, x in inputs.items() if n not in ("attention_mask", "mm_token_type_ids")}
    while len(ids) < len(prompt.token_ids) + test_families.NUM_TOKENS:
        logits = model(
            input_ids=torch.tensor([ids]), position_ids=rows[:, None], use_cache=False,
            mm_token_type_ids=torch.zeros(1, len(ids), dtype=torch.long), **given,
        ).logits  # fmt: skip
        ids.append(int(logits[0, -1].argmax()))
        rows = torch.cat([rows, rows.max().expand(len(rows), 1) + 1], dim=1)
    return ids[len(prompt.token_ids) :]


def load_media(
    family: Family, directory: Path, pool: VideoPool, questions: dict[str, Question]
) -> Loaded:
    """A checkpoint, and what transformers answers to questions about files."""
    write_checkpoint(family, directory)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 8192
    (directory / "config.json").write_text(json.dumps(config))
    model, processor = load(directory)
    theirs = test_families.load_reference(directory, family.auto)
    requests, expected = [], {}
    for name, question in questions.items():
        prompt = ask(pool, processor, question)
        inputs = their_inputs(family, directory, pool, question, prompt)
        requests.append(make_request(name, prompt))
        if family.video_placeholder and family.architecture in _BEHIND_VIDEOS:
            expected[name] = _generate_at(theirs, prompt, inputs)
        else:
            expected[name] = test_families.generate(theirs, prompt.token_ids, **inputs)
    assert len({tuple(tokens) for tokens in expected.values()}) >= len(expected) - 1
    return Loaded(family, directory, model, processor, requests, expected)
