"""Videos: the tokens of transformers for the same file, by every way, and frames that transformers would sample."""

import io
from collections.abc import Callable, Container, Iterator
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

from engines.base import DEFAULT_NUM_FRAMES, InvalidImage
from engines.core.sequence import Prompt
from engines.image_decoder import decode_image
from engines.text.processor import ChatProcessor
from engines.torch_backend.multimodal.processed import split
from engines.torch_backend.multimodal.transformers_images import (
    _BEHIND_VIDEOS,
    TAKES_VIDEO,
    in_words,
)
from shared.protocol import ChatMessage, ImagePart, ImageRef, TextPart, VideoOptions
from shared.settings.limits import LimitSettings
from tests.contract.test_model_family import make_image
from tests.engines.torch_backend import ways
from tests.engines.torch_backend.models import family_table, test_families
from tests.engines.torch_backend.models.family_table import Family, named
from tests.engines.torch_backend.models.test_families import (
    CPU,
    Loaded,
    generate,
    load,
    make_request,
)
from tests.engines.torch_backend.ways import Way
from tests.factories_settings import make_group
from tests.factories_torch import encode_in_smallest_parts, prefill_progress, smallest_chunks
from tests.factories_video import CLIPS, av, clip
from tests.long import IS_LONG
from worker.prepare.video_pool import VideoPool

#: of processors' own ways with numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
QUICK = frozenset({"Qwen2.5-VL", "Qwen3-VL", "GLM-4.1V"})
#: Of the ways, those for prompts of unlike lengths and few blocks are left out.
WAYS: list[Way] = [
    ways.run_alone, ways.run_batched, ways.run_one_after_another_has_begun, ways.run_beside_smooth_streams,
    ways.run_chunked, ways.run_prefix_cached, ways.run_encoder_cached, ways.run_taken_over,
]  # fmt: skip
QUICK_WAYS: list[Way] = [
    ways.run_beside_smooth_streams, ways.run_prefix_cached, ways.run_encoder_cached,
]  # fmt: skip
#: Strings are texts and names of clips, in turn; numbers are seeds of images.
Question = list[str | int]
QUESTIONS: dict[str, Question] = {
    "video": ["mp4", "What moves?"],
    "again": ["mp4", "What else?"],
    "other": ["variable", " and say."],
    "turned": ["rotated", "And now?"],
    "two": ["vp9", "or ", "hevc", "?"],
    "both": [3, "or ", "vp8", "?"],
}


def _qwen(processor: Any) -> None:
    video = processor.video_processor
    video.patch_size, video.max_frames, video.min_frames = 14, 16, 2
    video.size = {"shortest_edge": 784 * 2, "longest_edge": 784 * 12 * 8}
    video.min_pixels, video.max_pixels = 784, 784 * 6


def _glm(processor: Any) -> None:
    processor.video_processor.size = {"shortest_edge": 784 * 2, "longest_edge": 784 * 12 * 4}


def _square(processor: Any) -> None:
    processor.video_processor.size = {"height": 28, "width": 28}
    processor.video_processor.num_frames = 8


def _minicpm(processor: Any) -> None:
    video = processor.video_processor
    video.patch_size, video.scale_resolution, video.max_slice_nums = 7, 56, 1


def _gemma(processor: Any) -> None:
    video = processor.video_processor
    video.patch_size, video.pooling_kernel_size, video.max_soft_tokens, video.num_frames = (
        7,
        2,
        70,
        3,
    )


def _llama(processor: Any) -> None:
    video = processor.video_processor
    video.patch_size, video.num_frames = 14, 6
    video.size = {"shortest_edge": 784, "longest_edge": 784 * 6}


def _smolvlm(processor: Any) -> None:
    """One that leaves out the first and the last second of the longest clip."""
    video = processor.video_processor
    video.size, video.max_image_size = {"longest_edge": 56}, {"longest_edge": 28}
    video.num_frames, video.fps = 3, 1


def _smolvlm_processor(*more: str) -> Any:
    made: Any = named("SmolVLM").create_processor()  # type: ignore[misc]
    made.tokenizer.add_special_tokens({"additional_special_tokens": list(more)})
    return made


def _next(processor: Any) -> None:
    video = processor.video_processor
    video.size, video.crop_size, video.num_frames = (
        {"shortest_edge": 56},
        {"height": 56, "width": 56},
        6,
    )


def _next_config() -> Any:
    config: Any = named("LLaVA-NeXT-Video").create()
    config.vision_config.image_size = 56
    config.video_token_id = 302
    return config


def _omni(processor: Any) -> None:
    processor.video_processor.num_frames = 4


def _qwen25_processor() -> Any:
    made = named("Qwen2.5-VL").create_processor()  # type: ignore[misc]
    return transformers.Qwen2_5_VLProcessor(
        made.image_processor, made.tokenizer, made.video_processor
    )


def row(
    name: str,
    placeholder: str,
    edit: Callable[[Any], None],
    family: Family | None = None,
    **more: Any,
) -> Family:
    """A family of the table, with a processor of small videos."""
    family = replace(family or named(name), **more)
    create = family.create_processor
    assert create is not None

    def create_small() -> Any:
        processor = create()
        edit(processor)
        return processor

    return replace(family, create_processor=create_small, video_placeholder=placeholder)


_RUN = "<|vision_start|><|video_pad|><|vision_end|>"
_GLM_RUN = "<|begin_of_video|><|video|><|end_of_video|>"
VIDEO_FAMILIES = [
    row("Qwen2-VL", _RUN, _qwen),
    row("Qwen2.5-VL", _RUN, _qwen, create_processor=_qwen25_processor),
    row("Qwen2.5-Omni", "<|vision_bos|><|VIDEO|><|vision_eos|>", _omni),
    row("Qwen3-VL", "<|video_pad|>", _qwen),
    row("Qwen3-VL-MoE", "<|video_pad|>", _qwen),
    row("Qwen3.5", "<|video_pad|>", _qwen),
    row("Qwen3.5-MoE", "<|video_pad|>", _qwen),
    row("EXAONE 4.5", _RUN, _qwen),
    row("LLaVA-OneVision", "<video>", _square),
    row("InternVL 3", "<video>", _square),
    row("InternVL 2.5", "<video>", _square),
    row("GLM-4.1V", _GLM_RUN, _glm),
    row("GLM-4.5V", _GLM_RUN, _glm),
    row("GLM-4.6V", _GLM_RUN, _glm),
    row("Gemma 4", "<|video|>", _gemma),
    row("Gemma 4 E", "<|video|>", _gemma),
    row("MiniCPM-V 4.6", "<video_pad>", _minicpm),
    row("VideoLLaMA 3", "<|video_pad|>", _llama),
    row("LLaVA-NeXT-Video", "<video>", _next, create=_next_config),
    row("SmolVLM", "<video>", _smolvlm, create_processor=lambda: _smolvlm_processor("<video>")),
]
#: Prompts that transformers itself cannot take.
FAIL = {
    ("GLM-4.1V", "both"),
    ("GLM-4.5V", "both"),
    ("GLM-4.6V", "both"),
    ("LLaVA-NeXT-Video", "both"),
    ("SmolVLM", "both"),
}
RUN = [family for family in VIDEO_FAMILIES if IS_LONG or family.name in QUICK]


@pytest.fixture(scope="module")
def pool() -> Iterator[VideoPool]:
    pool = VideoPool(1, LimitSettings())
    yield pool
    pool.close()


def process(
    pool: VideoPool, processor: ChatProcessor, name: str, **options: Any
) -> tuple[tuple[int, ...], Any]:
    data = clip(name)
    ref = ImageRef("", len(data), CLIPS[name][1], 0, 0, video=VideoOptions(**options))
    with pool.open(io.BytesIO(data), ref) as video:
        made = processor.process_video(video)
        assert video.indices is not None
        return video.indices, made


def ask(pool: VideoPool, processor: ChatProcessor, question: Question) -> Prompt:
    return ask_of(processor, question, CLIPS, lambda name: process(pool, processor, name)[1])


def ask_of(
    processor: ChatProcessor, question: Question, names: Container[str], read: Callable[[str], Any]
) -> Prompt:
    """The prompt of a question with named media, which `read` makes ready for the model."""
    parts: list[TextPart | ImagePart] = []
    media: list[tuple[str, Any]] = []
    for part in question:
        if isinstance(part, str) and part not in names:
            parts.append(TextPart(part))
            continue
        parts.append(ImagePart(len(media)))
        if isinstance(part, str):
            media.append((part, read(part)))
        else:
            media.append(
                (f"{part}", processor.process_image(decode_image(make_image(28, 28, part))))
            )
    return processor.build_prompt([ChatMessage("user", tuple(parts))], media)


def whole(name: str) -> tuple[np.ndarray, VideoMetadata]:
    """All frames of a clip, decoded in this process, upright and in even steps, with what transformers must know."""
    with av.open(io.BytesIO(clip(name))) as container:
        decoded = list(container.decode(video=0))
    turns = (decoded[0].rotation // 90) % 4
    frames = np.stack([np.rot90(frame.to_ndarray(format="rgb24"), turns) for frame in decoded])
    length_s = 6.0 if name == "variable" else len(frames) / 25
    if name == "variable":
        times = np.array([frame.time for frame in decoded])
        length_s = float(times[-1] + decoded[-1].duration * decoded[-1].time_base)
        steps = np.arange(len(frames)) * length_s / len(frames)
        frames = frames[np.searchsorted(times, steps + 1e-4, side="right") - 1]
    fps, (height, width) = len(frames) / length_s, frames.shape[1:3]
    return frames, VideoMetadata(len(frames), fps, width, height, length_s, "pyav")


def their_inputs(
    family: Family, directory: Path, question: Question, prompt: Prompt
) -> dict[str, Any]:
    """What transformers' processor makes of whole videos, which it samples by itself."""
    processor: Any = AutoProcessor.from_pretrained(directory)
    text, images, videos, metadata = family.opening, [], [], []
    for part in question:
        if isinstance(part, int):
            text += family.placeholder
            images.append(Image.open(io.BytesIO(make_image(28, 28, part))))
        elif part in CLIPS:
            text += family.video_placeholder
            frames, about = whole(part)
            videos.append(frames)
            metadata.append(about)
        else:
            text += part
    options: dict[str, Any] = {"do_sample_frames": True}
    own = processor.video_processor
    if not (own.num_frames or own.fps or hasattr(own, "max_num_frames")):
        options["num_frames"] = min(DEFAULT_NUM_FRAMES, len(videos[0]))
    if own.num_frames and own.fps:
        options |= {"num_frames": own.num_frames, "fps": None}
    made = processor(
        text=[text + "\n"], images=images or None, videos=videos, video_metadata=metadata, return_tensors="pt",
        **options,
    )  # fmt: skip
    assert made.pop("input_ids")[0].tolist() == prompt.token_ids
    if "video_second_per_grid" in made:  # it assumes two frames a second
        steps = made["video_grid_thw"][:, 0].tolist()
        lengths = [about.duration or 0.0 for about in metadata]
        made["video_second_per_grid"] = torch.tensor(lengths) / torch.tensor(steps)
    return {
        name: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in made.items()
    }


@torch.inference_mode()
def generate_at(model: Any, prompt: Prompt, inputs: dict[str, Any]) -> list[int]:
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


@pytest.fixture(scope="module", params=RUN, ids=str)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: VideoPool
) -> Loaded:
    family: Family = request.param
    directory = tmp_path_factory.mktemp("family")
    family_table.write_checkpoint(family, directory)
    model, processor = load(directory)
    assert processor.takes_video
    theirs = test_families.load_reference(directory, family.auto)
    requests, expected = [], {}
    for name, question in QUESTIONS.items():
        if (family.name, name) in FAIL:
            continue
        prompt = ask(pool, processor, question)
        inputs = their_inputs(family, directory, question, prompt)
        requests.append(make_request(name, prompt))
        as_trained = family.architecture in _BEHIND_VIDEOS
        expected[name] = (
            generate_at(theirs, prompt, inputs)
            if as_trained
            else generate(theirs, prompt.token_ids, **inputs)
        )
    return Loaded(family, directory, model, processor, requests, expected)


@pytest.mark.parametrize("way", WAYS if IS_LONG else QUICK_WAYS)
def test_tokens_are_those_of_transformers(loaded: Loaded, way: Way) -> None:
    if way is ways.run_prefix_cached and not loaded.model.shares_prefixes:
        pytest.skip("it has no prefix cache")
    assert way(loaded.start, loaded.requests) == loaded.expected


def test_chunks_of_a_video_have_the_features_of_the_whole(loaded: Loaded) -> None:
    [image] = loaded.requests[0].images
    with smallest_chunks():
        chunks = split(image)
    assert (len(chunks) > 1) is TAKES_VIDEO[loaded.family.architecture]
    whole, *found = loaded.model.encode([image, *chunks], CPU, torch.float32)
    torch.testing.assert_close(torch.cat(found), whole)


@pytest.mark.parametrize("max_images", [1, 8])
def test_prefill_begins_when_the_first_chunk_is_encoded(loaded: Loaded, max_images: int) -> None:
    engine = loaded.start(max_images_per_step=max_images)
    if max_images > 1:
        encode_in_smallest_parts(engine)
    request = loaded.requests[0]
    with smallest_chunks():
        num_chunks = len(split(request.images[0]))
        found = prefill_progress(engine, request)
    assert found[-1] == (num_chunks, len(request.prompt_token_ids))
    if num_chunks > 1:
        stop = request.images[0].offset + request.images[0].num_tokens
        begun = [computed for encoded, computed in found if 0 < encoded < num_chunks]
        assert request.images[0].offset < max(begun) < stop


def test_answers_differ(loaded: Loaded) -> None:
    assert len({tuple(tokens) for tokens in loaded.expected.values()}) >= len(loaded.expected) - 1


def test_a_request_chooses_its_frames(loaded: Loaded, pool: VideoPool) -> None:
    for options, least, most in (
        ({"num_frames": 4}, 4, 4), ({"fps": 2.0}, 4, 4), ({"fps": 1000.0}, 16, 50), ({"num_frames": 200}, 16, 50),
    ):  # fmt: skip
        indices, made = process(pool, loaded.processor, "mp4", **options)
        assert least <= len(indices) == made.num_frames <= most
        assert list(indices) == sorted(indices)


def test_more_frames_than_the_limit_are_refused_by_their_field(loaded: Loaded) -> None:
    small = VideoPool(1, make_group(LimitSettings, max_video_frames=4))
    with pytest.raises(InvalidImage, match="send at most 4") as refused:
        process(small, loaded.processor, "mp4", fps=5.0)
    assert refused.value.param == "fps"
    indices, _ = process(small, loaded.processor, "mp4")
    assert len(indices) <= 4
    small.close()


def test_start_and_end_around_a_video_are_those_of_its_frames(
    pool: VideoPool, tmp_path: Path
) -> None:
    """As Qwen3-VL was trained; its published template writes them around the placeholder too."""
    prompts = []
    for placeholder in (_RUN, "<|video_pad|>"):
        family = row("Qwen3-VL", placeholder, _qwen)
        family_table.write_checkpoint(family, tmp_path / placeholder.strip("<|>"))
        _, processor = load(tmp_path / placeholder.strip("<|>"))
        prompts.append(ask(pool, processor, QUESTIONS["video"]))
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


@pytest.mark.parametrize(
    ("name", "intro"),
    [("mp4", "two frames from a 0:00:02 [H:"), ("variable", "three frames from a 0:00:05 [H:")],
)
def test_a_published_smolvlm_takes_videos(
    pool: VideoPool, tmp_path: Path, name: str, intro: str
) -> None:
    family = row(
        "SmolVLM", "", _smolvlm, create_processor=lambda: _smolvlm_processor("<|im_start|>")
    )
    family_table.write_checkpoint(family, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(SMOLVLM_TEMPLATE)
    _, processor = load(tmp_path)
    assert processor.takes_video
    theirs: Any = AutoProcessor.from_pretrained(tmp_path)
    spoken = "What moves, <video> or <global-img>?"
    frames, about = whole(name)

    def render(*content: dict[str, str]) -> str:
        messages = [{"role": "user", "content": list(content)}]
        return theirs.apply_chat_template(messages, add_generation_prompt=True)

    asked = render({"type": "video"}, {"type": "text", "text": "What moves?"})
    made = theirs(
        text=[asked], videos=[frames], video_metadata=[about], do_sample_frames=True, return_tensors="pt"
    )  # fmt: skip
    prompt = ask(pool, processor, [name, "What moves?"])
    assert made["input_ids"][0].tolist() == prompt.token_ids
    assert f"User: You are provided the following series of {intro}" in theirs.decode(
        prompt.token_ids
    )
    prompt = ask(pool, processor, [spoken])
    assert theirs.decode(prompt.token_ids) == "<s>" + render({"type": "text", "text": spoken})
    assert theirs.tokenizer.convert_tokens_to_ids("<global-img>") not in prompt.token_ids
    # Transformers pads the shorter of two videos with blank frames, and counts them.
    counts = theirs.decode(ask(pool, processor, ["mp4", "or ", "variable"]).token_ids)
    assert "series of two frames" in counts
    assert "series of three frames" in counts


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"), (8, "eight"), (13, "thirteen"), (20, "twenty"), (64, "sixty-four"), (100, "one hundred"),
        (101, "one hundred and one"), (256, "two hundred and fifty-six"), (1000, "one thousand"),
        (1001, "one thousand and one"), (12345, "twelve thousand, three hundred and forty-five"),
    ],
)  # fmt: skip
def test_numbers_are_spelled_as_num2words_does(number: int, words: str) -> None:
    assert in_words(number) == words


@pytest.mark.timeout(300)
def test_a_stream_goes_on_beside_a_video_of_64_frames(pool: VideoPool, tmp_path: Path) -> None:
    def enlarge(processor: Any) -> None:
        _qwen(processor)
        processor.video_processor.max_frames = 64
        processor.video_processor.size = {"shortest_edge": 784 * 2, "longest_edge": 2**26}

    family_table.write_checkpoint(row("Qwen3-VL", _RUN, enlarge), tmp_path)
    test_families.lengthen_context(tmp_path)
    model, processor = load(tmp_path)
    _, made = process(pool, processor, "large", num_frames=64)
    parts = (ImagePart(0), TextPart("What moves?"))
    prompt = processor.build_prompt([ChatMessage("user", parts)], [("video", made)])
    assert prompt.images[0].num_tokens > 6000
    median, p99, _ = test_families.gaps_beside(model, processor, prompt)
    assert p99 <= max(2 * median, 0.25)


def test_every_listed_family_is_tested() -> None:
    assert {family.architecture for family in VIDEO_FAMILIES} == TAKES_VIDEO.keys()


def test_text_follows_the_largest_position_of_a_video(pool: VideoPool, tmp_path: Path) -> None:
    """As Qwen2.5-VL was trained: 16 steps of 1/8 s with 4 positions a second, then text."""
    family = next(each for each in VIDEO_FAMILIES if each.name == "Qwen2.5-VL")
    family_table.write_checkpoint(family, tmp_path)
    _, processor = load(tmp_path)
    prompt = ask(pool, processor, QUESTIONS["video"])
    [item] = prompt.images
    [[steps, height, width]] = item.pixels.inputs["video_grid_thw"].tolist()
    stop = item.offset + item.num_tokens
    of_time, of_rows, of_columns = (np.array(row) for row in prompt.positions)
    assert item.num_frames == 2 * steps
    times = item.offset + np.arange(steps) // 2
    assert (of_time[item.offset : stop] == times.repeat(item.num_tokens // steps)).all()
    largest = max(of_time[:stop].max(), of_rows[:stop].max(), of_columns[:stop].max())
    assert largest > item.offset + max(height, width) // 2  # else nothing is tested
    assert [row[stop] for row in prompt.positions] == [largest + 1] * 3
    after = np.arange(len(prompt.token_ids) - stop) + largest + 1
    assert all((row[stop:] == after).all() for row in (of_time, of_rows, of_columns))


def test_positions_of_a_video_are_25_a_second_in_qwen_omni(pool: VideoPool, tmp_path: Path) -> None:
    """As it was trained: transformers assumes two frames a second, here there are four in nearly six."""
    family = next(each for each in VIDEO_FAMILIES if each.name == "Qwen2.5-Omni")
    family_table.write_checkpoint(family, tmp_path)
    _, processor = load(tmp_path)
    prompt = ask(pool, processor, QUESTIONS["other"])
    [item] = prompt.images
    assert item.num_frames == 4
    stop = item.offset + item.num_tokens
    second = item.offset + int(25 * (whole("variable")[1].duration or 0) / 2)
    assert second > item.offset + 60
    assert set(prompt.positions[0][item.offset : stop]) == {item.offset, second}
    after = range(len(prompt.token_ids) - stop)
    assert all(row[stop:] == tuple(second + 1 + i for i in after) for row in prompt.positions)
