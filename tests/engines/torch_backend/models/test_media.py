"""Videos and audio: the tokens of transformers for the same file, by every way, and what transformers would sample."""

import io
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata

from engines.base import DEFAULT_NUM_FRAMES, InvalidImage, InvalidRequest
from engines.core.sequence import ImageInput, Prompt
from engines.image_decoder import decode_image
from engines.registry import create_engine
from engines.text.processor import ChatProcessor
from engines.torch_backend.multimodal import parts
from engines.torch_backend.multimodal.processed import split
from engines.torch_backend.multimodal.transformers_audio import TAKES_AUDIO
from engines.torch_backend.multimodal.transformers_images import (
    _BEHIND_VIDEOS,
    TAKES_VIDEO,
    in_words,
)
from gateway.api.transcriptions import TranscriptionRequest
from shared.protocol import ChatMessage, ImagePart, ImageRef, ModelCard, TextPart, VideoOptions
from shared.settings.limits import LimitSettings
from tests.contract.test_model_family import make_image
from tests.engines.torch_backend import ways
from tests.engines.torch_backend.models.family_table import (
    Family,
    named,
    own,
    sub,
    tokens,
    write_checkpoint,
)
from tests.engines.torch_backend.models.test_families import (
    CPU,
    NUM_TOKENS,
    Loaded,
    generate,
    load,
    load_processor,
    load_reference,
    make_request,
)
from tests.engines.torch_backend.ways import Way
from tests.factories_audio import SOUNDS, make_audio, sound
from tests.factories_settings import make_group
from tests.factories_tekken import make_tekken
from tests.factories_torch import encode_in_smallest_parts, prefill_progress, smallest_chunks
from tests.factories_video import CLIPS, av, clip
from tests.long import few, long
from tests.worker.conftest import pool as pool
from worker.prepare.video_pool import VideoPool

#: of processors' own ways with numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
RATE = 16_000
#: Strings are texts and names of files; numbers are seeds of images.
Question = list[str | int]


def some(families: Sequence[Family], *short: str) -> Sequence[Family]:
    return few(families, [named(name, families) for name in short])


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
    video_row("Qwen2.5-VL", RUN, _QWEN),
    video_row("Qwen2.5-Omni", "<|vision_bos|><|VIDEO|><|vision_eos|>", {"num_frames": 4}),
    *(video_row(name, "<|video_pad|>", _QWEN) for name in ("Qwen3-VL", "Qwen3-VL-MoE", "Qwen3.5", "Qwen3.5-MoE")),
    video_row("EXAONE 4.5", RUN, _QWEN),
    *(video_row(name, "<video>", _SQUARE) for name in ("LLaVA-OneVision", "InternVL 3", "InternVL 2.5")),
    *(video_row(name, _GLM_RUN, _GLM) for name in ("GLM-4.1V", "GLM-4.5V", "GLM-4.6V")),
    *(video_row(name, "<|video|>", _GEMMA) for name in ("Gemma 4", "Gemma 4 E")),
    video_row("MiniCPM-V 4.6", "<video_pad>", {"patch_size": 7, "scale_resolution": 56, "max_slice_nums": 1}),
    video_row(
        "VideoLLaMA 3", "<|video_pad|>",
        {"patch_size": 14, "num_frames": 6, "size": {"shortest_edge": 784 * 48, "longest_edge": 784 * 300}},
    ),
    video_row(
        "LLaVA-NeXT-Video", "<video>",
        {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "num_frames": 6},
        create=_next_config,
    ),
    video_row("SmolVLM", "<video>", SMOLVLM, create_processor=lambda: smolvlm_processor("<video>")),
]  # fmt: skip


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


TOWER: dict[str, Any] = {
    "d_model": 32, "hidden_size": 32, "encoder_layers": 2, "num_hidden_layers": 2, "encoder_attention_heads": 2,
    "num_attention_heads": 2, "encoder_ffn_dim": 48, "intermediate_size": 48, "num_mel_bins": 80,
    "max_source_positions": 200,
}  # fmt: skip
AUDIO_FAMILIES = [
    own(
        "Qwen2-Audio", "", "Qwen2Audio", tokens("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"), sounds=_whisper,
        class_name="Qwen2AudioForConditionalGeneration", audio_placeholder="<|audio_bos|><|AUDIO|><|audio_eos|>",
        audio_config={**TOWER, "model_type": "qwen2_audio_encoder"},
        text_config=sub("qwen2"), audio_token_id=302, audio_token_index=302,
    ),
    own(
        "GLM-ASR", "", "GlmAsr", tokens("<|audio|>"), sounds=_whisper,
        options={"audio_token": "<|audio|>", "max_audio_len": 40},
        class_name="GlmAsrForConditionalGeneration", audio_placeholder="<|audio|>",
        audio_config={
            **TOWER, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 200,
        },
        text_config=sub("llama"), audio_token_id=302,
    ),
    own(
        "Audio Flamingo 3", "", "AudioFlamingo3", tokens("<sound>"), sounds=_whisper, options={"max_audio_len": 40},
        class_name="AudioFlamingo3ForConditionalGeneration", audio_placeholder="<sound>",
        audio_config=TOWER, text_config=sub("qwen2"), audio_token_id=302,
    ),
    replace(named("Gemma 4 E"), class_name="Gemma4ForConditionalGeneration", audio_placeholder="<|audio|>"),
    replace(
        named("Qwen2.5-Omni"), class_name="Qwen2_5OmniThinkerForConditionalGeneration",
        audio_placeholder="<|audio_bos|><|AUDIO|><|audio_eos|>",
    ),
    own(
        "Voxtral", "", "Voxtral", tokens(), class_name="VoxtralForConditionalGeneration",
        audio_placeholder="[BEGIN_AUDIO][AUDIO]", read=_read_voxtral, create_processor=_VoxtralFiles,
        audio_config={
            "model_type": "voxtral_encoder", "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_mel_bins": 80,
        },
        text_config=sub("llama", head_dim=16, max_position_embeddings=2048), audio_token_id=24,
    ),
    replace(
        named("Gemma 3n"), class_name="Gemma3nForConditionalGeneration", audio_placeholder="<audio_soft_token>"
    ),
]  # fmt: skip


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
    """Greedy tokens of transformers' forward pass at the prompt's positions, without a KV cache."""
    ids = list(prompt.token_ids)
    rows = torch.tensor(prompt.positions)
    given = {n: x for n, x in inputs.items() if n not in ("attention_mask", "mm_token_type_ids")}
    while len(ids) < len(prompt.token_ids) + NUM_TOKENS:
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
    theirs = load_reference(directory, family.auto)
    requests, expected = [], {}
    for name, question in questions.items():
        prompt = ask(pool, processor, question)
        inputs = their_inputs(family, directory, pool, question, prompt)
        requests.append(make_request(name, prompt))
        if family.video_placeholder and family.architecture in _BEHIND_VIDEOS:
            expected[name] = _generate_at(theirs, prompt, inputs)
        else:
            expected[name] = generate(theirs, prompt.token_ids, **inputs)
    assert len({tuple(tokens) for tokens in expected.values()}) >= len(expected) - 1
    return Loaded(family, directory, model, processor, requests, expected)


VIDEO_QUESTIONS: dict[str, Question] = {
    "video": ["mp4", "What moves?"],
    "again": ["mp4", "What else?"],
    "other": ["variable", " and say."],
    "turned": ["rotated", "And now?"],
    "two": ["vp9", "or ", "hevc", "?"],
    "both": [3, "or ", "vp8", "?"],
}
#: Families for which transformers accepts no images and videos in one prompt.
TAKES_ONE_KIND = ("GLM-4.1V", "GLM-4.5V", "GLM-4.6V", "LLaVA-NeXT-Video", "SmolVLM")


@pytest.fixture(scope="module", params=some(VIDEO_FAMILIES, "Qwen2.5-VL", "VideoLLaMA 3"), ids=str)
def video(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: VideoPool
) -> Loaded:
    is_one = request.param.name in TAKES_ONE_KIND
    questions = {n: each for n, each in VIDEO_QUESTIONS.items() if n != "both" or not is_one}
    return load_media(request.param, tmp_path_factory.mktemp("family"), pool, questions)


@pytest.mark.parametrize(
    "way", few(ways.ROOMY_WAYS, [ways.run_beside_smooth_streams, ways.run_prefix_cached])
)
def test_tokens_of_videos_are_those_of_transformers(video: Loaded, way: Way) -> None:
    if way is ways.run_prefix_cached and not video.model.shares_prefixes:
        pytest.skip("it has no prefix cache")
    assert way(video.start, video.requests) == video.expected


def test_chunks_of_a_video_have_the_features_of_the_whole(video: Loaded) -> None:
    [image] = video.requests[0].images
    with smallest_chunks():
        chunks = split(image)
    assert len(chunks) > 1
    whole, *found = video.model.encode([image, *chunks], CPU, torch.float32)
    torch.testing.assert_close(torch.cat(found), whole)


@pytest.mark.parametrize("max_images", [1, 8])
def test_prefill_begins_when_the_first_chunk_is_encoded(video: Loaded, max_images: int) -> None:
    engine = video.start(max_images_per_step=max_images)
    if max_images > 1:
        encode_in_smallest_parts(engine)
    request = video.requests[0]
    with smallest_chunks():
        num_chunks = len(split(request.images[0]))
        found = prefill_progress(engine, request)
    assert found[-1] == (num_chunks, len(request.prompt_token_ids))
    stop = request.images[0].offset + request.images[0].num_tokens
    begun = [computed for encoded, computed in found if 0 < encoded < num_chunks]
    assert request.images[0].offset < max(begun) < stop


@pytest.mark.parametrize("by_parts", [False, True])
def test_room_for_chunks_is_made_before_they_are_encoded(video: Loaded, by_parts: bool) -> None:
    other, request = video.requests[2], video.requests[0]
    with smallest_chunks():
        chunks = split(request.images[0])
        sizes = [rows.nbytes for rows in video.model.encode(chunks, CPU, torch.float32)]
        engine = video.start(encoder_cache_bytes=(limit := max(sizes)))
        if by_parts:
            encode_in_smallest_parts(engine)
        ways.run_to_end(engine, [other])
        encode, found = video.model.encode, list[tuple[int, int]]()

        def observed(images: list[ImageInput], *given: Any) -> list[torch.Tensor]:
            held = engine.runner.encoder_cache_counts()[2]
            features = encode(images, *given)
            found.append((held, sum(rows.nbytes for rows in features)))
            return features

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(video.model, "encode", observed)
            prefill_progress(engine, request)
    assert sum(sizes) > limit
    assert sum(new for _, new in found) == sum(sizes)
    assert all(held + new <= limit for held, new in found)


def test_a_second_question_about_a_video_encodes_nothing(video: Loaded) -> None:
    engine = video.start(enable_prefix_cache=False)
    ways.run_to_end(engine, video.requests[:1])
    before = engine.stats()
    ways.run_to_end(engine, video.requests[1:2])
    after = engine.stats()
    hits = after.num_encoder_hits - before.num_encoder_hits
    assert hits == after.num_encoder_queries - before.num_encoder_queries > 0


def test_a_request_chooses_its_frames(video: Loaded, pool: VideoPool) -> None:
    for options, least, most in (
        ({"num_frames": 4}, 4, 4), ({"fps": 2.0}, 4, 4), ({"fps": 1000.0}, 16, 50), ({"num_frames": 200}, 16, 50),
        ({"num_frames": 1}, 1, 2), ({"fps": 0.1}, 1, 2), ({"start_s": 1.98}, 1, 2), ({"start_s": 1.93}, 1, 2),
        ({"num_frames": 99, "start_s": 0.76}, 3, 32),
    ):  # fmt: skip
        indices, made = process_video(pool, video.processor, "mp4", **options)
        assert least <= len(indices) <= made.num_frames <= most
        assert list(indices) == sorted(indices)


def test_more_frames_than_the_limit_are_refused_by_their_field(video: Loaded) -> None:
    with closing(VideoPool(1, make_group(LimitSettings, max_video_frames=4))) as small:
        with pytest.raises(InvalidImage, match="the limit is 4") as refused:
            process_video(small, video.processor, "mp4", fps=5.0)
        assert refused.value.param == "fps"
        indices, _ = process_video(small, video.processor, "mp4")
        assert len(indices) <= 4


def test_start_and_end_around_a_video_are_those_of_its_frames(
    pool: VideoPool, tmp_path: Path
) -> None:
    """As Qwen3-VL was trained; its published template writes them around the placeholder too."""
    prompts = []
    for number, placeholder in enumerate((RUN, "<|video_pad|>")):
        family = replace(named("Qwen3-VL", VIDEO_FAMILIES), video_placeholder=placeholder)
        write_checkpoint(family, tmp_path / f"{number}")
        processor = load_processor(tmp_path / f"{number}")
        prompts.append(ask(pool, processor, VIDEO_QUESTIONS["video"]))
    assert prompts[0].token_ids == prompts[1].token_ids
    assert prompts[0].positions == prompts[1].positions


#: of HuggingFaceTB/SmolVLM2-500M-Video-Instruct: it writes nothing for a video, and its tokenizer has no `<video>`
SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def test_a_published_smolvlm_takes_videos(pool: VideoPool, tmp_path: Path) -> None:
    create = partial(smolvlm_processor, "<|im_start|>")
    write_checkpoint(video_row("SmolVLM", "", SMOLVLM, create_processor=create), tmp_path)
    (tmp_path / "chat_template.jinja").write_text(SMOLVLM_TEMPLATE)
    processor = load_processor(tmp_path)
    assert processor.takes_video
    theirs: Any = AutoProcessor.from_pretrained(tmp_path)

    def render(*content: dict[str, str]) -> str:
        messages = [{"role": "user", "content": list(content)}]
        return theirs.apply_chat_template(messages, add_generation_prompt=True)

    asked = render({"type": "video"}, {"type": "text", "text": "What moves?"})
    for name, counted in (("mp4", "two frames"), ("variable", "three frames")):
        frames, about = whole(name)
        made = theirs(
            text=[asked], videos=[frames], video_metadata=[about], do_sample_frames=True, return_tensors="pt"
        )  # fmt: skip
        prompt = ask(pool, processor, [name, "What moves?"])
        assert made["input_ids"][0].tolist() == prompt.token_ids
        assert f"the following series of {counted} from a 0:00:0" in theirs.decode(prompt.token_ids)
    spoken = "What moves, <video> or <global-img>?"
    prompt = ask(pool, processor, [spoken])
    assert theirs.decode(prompt.token_ids) == "<s>" + render({"type": "text", "text": spoken})
    assert theirs.tokenizer.convert_tokens_to_ids("<global-img>") not in prompt.token_ids
    # Transformers pads the shorter of two videos with blank frames, and counts them.
    counts = theirs.decode(ask(pool, processor, ["mp4", "or ", "variable"]).token_ids)
    assert "series of two frames" in counts
    assert "series of three frames" in counts


def test_numbers_are_spelled_as_num2words_does() -> None:
    spelled = {
        0: "zero", 13: "thirteen", 20: "twenty", 64: "sixty-four", 100: "one hundred",
        256: "two hundred and fifty-six", 1000: "one thousand", 1001: "one thousand and one",
        12345: "twelve thousand, three hundred and forty-five",
    }  # fmt: skip
    assert {number: in_words(number) for number in spelled} == spelled


def test_every_listed_family_is_tested() -> None:
    assert {family.architecture for family in VIDEO_FAMILIES} == TAKES_VIDEO.keys()
    assert {family.architecture for family in AUDIO_FAMILIES} == TAKES_AUDIO


def test_text_follows_the_largest_position_of_a_video(pool: VideoPool, tmp_path: Path) -> None:
    """As Qwen2.5-VL was trained: 16 steps of 1/8 s with 4 positions a second, then text."""
    write_checkpoint(named("Qwen2.5-VL", VIDEO_FAMILIES), tmp_path)
    processor = load_processor(tmp_path)
    prompt = ask(pool, processor, VIDEO_QUESTIONS["video"])
    [item] = prompt.images
    [[steps, height, width]] = item.pixels.inputs["video_grid_thw"].tolist()
    stop = item.offset + item.num_tokens
    of_time, of_rows, of_columns = (np.array(row) for row in prompt.positions)
    assert item.num_frames == 2 * steps
    times = item.offset + np.arange(steps) // 2
    assert (of_time[item.offset : stop] == times.repeat(item.num_tokens // steps)).all()
    largest = max(of_time[:stop].max(), of_rows[:stop].max(), of_columns[:stop].max())
    assert largest > item.offset + max(height, width) // 2  # else nothing is tested
    after = np.arange(len(prompt.token_ids) - stop) + largest + 1
    assert all((row[stop:] == after).all() for row in (of_time, of_rows, of_columns))


def test_positions_of_a_video_are_25_a_second_in_qwen_omni(pool: VideoPool, tmp_path: Path) -> None:
    """As it was trained: transformers assumes two frames a second, here there are four in nearly six."""
    write_checkpoint(named("Qwen2.5-Omni", VIDEO_FAMILIES), tmp_path)
    processor = load_processor(tmp_path)
    prompt = ask(pool, processor, VIDEO_QUESTIONS["other"])
    [item] = prompt.images
    assert item.num_frames == 4
    stop = item.offset + item.num_tokens
    second = item.offset + int(25 * (whole("variable")[1].duration or 0) / 2)
    assert second > item.offset + 60
    assert set(prompt.positions[0][item.offset : stop]) == {item.offset, second}
    after = range(len(prompt.token_ids) - stop)
    assert all(row[stop:] == tuple(second + 1 + i for i in after) for row in prompt.positions)


AUDIO_QUESTIONS: dict[str, Question] = {
    "audio": ["wav", "What is it?"],
    "again": ["wav", "What else?"],
    "other": ["See: ", "mp3", " and say."],
    # of one length: transformers pads the audio of a prompt to the longest, which Gemma 3n hears at the end
    "two": ["flac", "or ", "opus", "?"],
    "both": [3, "or ", "m4a", "?"],
    "text": ["Say a word."],
}
ONE_AUDIO = frozenset({"GLM-ASR", "Audio Flamingo 3"})
#: It pads audio to windows of half a minute.
ANY_LENGTH = frozenset({"Voxtral"})


@pytest.fixture(scope="module", params=some(AUDIO_FAMILIES, "GLM-ASR", "Qwen2-Audio"), ids=str)
def audio_model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: VideoPool
) -> Loaded:
    family = request.param
    questions = {
        name: question
        for name, question in AUDIO_QUESTIONS.items()
        if (name != "both" or family.placeholder)
        and (name != "two" or family.name not in ONE_AUDIO)
    }
    return load_media(family, tmp_path_factory.mktemp("family"), pool, questions)


@pytest.mark.parametrize(
    "way", few(ways.ROOMY_WAYS, [ways.run_beside_smooth_streams, ways.run_encoder_cached])
)
def test_tokens_of_audio_are_those_of_transformers(
    audio_model: Loaded, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "PART_S", 0.0)
    assert way(audio_model.start, audio_model.requests) == audio_model.expected


def test_audio_that_the_processor_cannot_use_is_refused(
    audio_model: Loaded, pool: VideoPool
) -> None:
    if audio_model.family.name in ONE_AUDIO:
        with pytest.raises(InvalidRequest, match="accepts one audio file; the request has 2"):
            ask(pool, audio_model.processor, AUDIO_QUESTIONS["two"])
    if audio_model.family.name not in ANY_LENGTH:
        with pytest.raises(
            InvalidImage, match=r"41.0 s long; this model accepts at most (4|40|30) s"
        ):
            process_audio(pool, audio_model.processor, make_audio(seconds=41.0))
        with pytest.raises(InvalidImage, match=r"too short|cannot process this audio"):
            process_audio(pool, audio_model.processor, make_audio(seconds=0.001))
    data = sound("float")  # its last samples may fill no frame
    with pytest.raises(InvalidImage, match="not finite"):
        process_audio(pool, audio_model.processor, data[:-4000] + b"\0\0\xc0\x7f" + data[-3996:])


def test_long_audio_is_encoded(audio_model: Loaded, pool: VideoPool) -> None:
    audio = make_audio(seconds=min(audio_model.processor.max_audio_s, 40.0))
    made = process_audio(pool, audio_model.processor, audio)
    image = ImageInput(0, made.num_slots, "audio", made, kind="audio")
    with smallest_chunks():
        chunks = split(image)
    assert (len(chunks) > 1) is (audio_model.family.name in ONE_AUDIO | ANY_LENGTH)
    features, *found = audio_model.model.encode([image, *chunks], CPU, torch.float32)
    assert len(features) == made.num_slots
    torch.testing.assert_close(torch.cat(found), features)


@long("families")
@torch.inference_mode()
def test_audio_of_gemma_3n_does_not_depend_on_longer_audio(pool: VideoPool, tmp_path: Path) -> None:
    """Transformers pads it to the longest of the prompt, and the end of its features changes."""
    family = named("Gemma 3n", AUDIO_FAMILIES)
    write_checkpoint(family, tmp_path)
    model, processor = load(tmp_path)
    theirs = load_reference(tmp_path, family.auto)
    extract = AutoProcessor.from_pretrained(tmp_path).feature_extractor
    samples = [samples_of(pool, name) for name in ("opus", "m4a")]
    of_both, alone = [
        theirs.model.get_audio_features(
            made["input_features"], ~made["input_features_mask"]
        ).pooler_output[0]
        for made in (extract(each, return_tensors="pt") for each in (samples, samples[:1]))
    ]
    assert (of_both - alone).abs()[-1].max() > 0.1
    image = ask(pool, processor, ["m4a", "or ", "opus"]).images[1]
    [features] = model.encode([image], CPU, torch.float32)
    torch.testing.assert_close(features[: len(alone)], alone)


SLOTS = "[BEGIN_AUDIO]" + "[AUDIO]" * 375
VOXTRAL_PROMPTS: list[tuple[list[tuple[str, list[str]]], str]] = [
    (
        [("system", ["Be brief."]), ("user", ["Say", "a word."]), ("assistant", ["the"]), ("user", ["No"])],
        "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Say\n\na word.[/INST]the</s>[INST]No[/INST]",
    ),
    ([("user", ["a"]), ("user", ["b", "wav"]), ("user", ["c"])], f"<s>[INST]a\n\nb{SLOTS}c[/INST]"),
    (
        [("user", ["wav", "Transcribe the audio. It is loud."])],
        f"<s>[INST]{SLOTS}Transcribe the audio. It is loud.[/INST]",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def voxtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[ChatProcessor, Any]:
    """Our processor of such a checkpoint, and the tokenizer of transformers."""
    directory = tmp_path_factory.mktemp("voxtral")
    write_checkpoint(named("Voxtral", AUDIO_FAMILIES), directory)
    return load_processor(directory), AutoProcessor.from_pretrained(directory).tokenizer  # type: ignore[attr-defined]


def ask_voxtral(
    pool: VideoPool, processor: ChatProcessor, turns: list[tuple[str, list[str]]]
) -> Prompt:
    messages, media = [], []
    for role, texts in turns:
        parts: list[TextPart | ImagePart] = []
        for text in texts:
            parts.append(ImagePart(len(media)) if text in SOUNDS else TextPart(text))
            if text in SOUNDS:
                media.append((text, read(pool, processor, text)))
        messages.append(ChatMessage(role, tuple(parts)))  # type: ignore[arg-type]
    return processor.build_prompt(messages, media)


def test_prompts_of_voxtral_are_those_of_mistral_common(
    voxtral: tuple[ChatProcessor, Any], pool: VideoPool
) -> None:
    ours, theirs = voxtral
    card = ModelCard("m", 0, 1, 1, transcription_prompt=ours.transcription_prompt)
    asked = list(VOXTRAL_PROMPTS)
    for language, end in ((None, "[TRANSCRIBE]"), ("fr", "lang:fr[TRANSCRIBE]")):
        text = TranscriptionRequest(file="f", model="m", language=language).instruction(card)
        asked.append(([("user", ["wav", text])], f"<s>[INST]{SLOTS}[/INST]{end}"))
    for turns, text in asked:
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        assert ask_voxtral(pool, ours, turns).token_ids == expected
    with pytest.raises(InvalidRequest, match="no system message with audio"):
        ask_voxtral(pool, ours, [("system", ["Be brief."]), ("user", ["wav", "What?"])])


@torch.inference_mode()
def test_long_audio_of_voxtral_is_encoded_window_by_window(pool: VideoPool, tmp_path: Path) -> None:
    family = named("Voxtral", AUDIO_FAMILIES)
    write_checkpoint(family, tmp_path)
    model, processor = load(tmp_path)
    audio = process_audio(pool, processor, make_audio(seconds=71.0, rate=8000))
    assert audio.num_slots == 3 * 375
    tower, sizes = model.front.inner.model.audio_tower, []  # type: ignore[union-attr]
    hook = tower.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    image = ImageInput(0, audio.num_slots, "audio", audio)
    rows = torch.cat(model.encode(split(image), CPU, torch.float32))
    hook.remove()
    assert sizes == [1, 1, 1]
    theirs = load_reference(tmp_path, family.auto)
    whole = theirs.get_audio_features(audio.inputs["input_features"], return_dict=True)
    torch.testing.assert_close(rows, whole.pooler_output, rtol=0, atol=1e-5)


def test_the_card_says_what_a_checkpoint_takes(audio_model: Loaded) -> None:
    started = create_engine({"kind": "torch", "device": "cpu", "model": str(audio_model.directory)})
    assert started.card.supports_audio
    is_trained = audio_model.family.name in ONE_AUDIO | ANY_LENGTH
    assert bool(started.card.transcription_prompt) == is_trained
    assert started.card.supports_images == bool(audio_model.family.placeholder)
