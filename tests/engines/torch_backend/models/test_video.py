"""Videos: the tokens of transformers for the same file, by every way, and frames that transformers would sample."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoProcessor

from engines.base import InvalidImage
from engines.torch_backend.multimodal.processed import split
from engines.torch_backend.multimodal.transformers_images import TAKES_VIDEO, in_words
from shared.settings.limits import LimitSettings
from tests.engines.torch_backend import ways
from tests.engines.torch_backend.models.family_table import write_checkpoint
from tests.engines.torch_backend.models.media import (
    RUN,
    SMOLVLM,
    VIDEO_FAMILIES,
    Question,
    ask,
    load_media,
    named_video,
    process_video,
    smolvlm_processor,
    video_row,
    whole,
)
from tests.engines.torch_backend.models.media import pool as pool
from tests.engines.torch_backend.models.test_families import CPU, Loaded, load
from tests.engines.torch_backend.ways import Way
from tests.factories_settings import make_group
from tests.factories_torch import encode_in_smallest_parts, prefill_progress, smallest_chunks
from tests.long import IS_LONG, few
from worker.prepare.video_pool import VideoPool

#: of processors' own ways with numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
QUICK = [each for each in VIDEO_FAMILIES if each.name in ("Qwen2.5-VL", "Qwen3-VL")]
#: Of the ways, those for prompts of unlike lengths and few blocks are left out.
WAYS: list[Way] = [
    ways.run_alone, ways.run_batched, ways.run_one_after_another_has_begun, ways.run_beside_smooth_streams,
    ways.run_chunked, ways.run_prefix_cached, ways.run_encoder_cached, ways.run_taken_over,
]  # fmt: skip
QUICK_WAYS: list[Way] = [ways.run_beside_smooth_streams, ways.run_prefix_cached]
QUESTIONS: dict[str, Question] = {
    "video": ["mp4", "What moves?"],
    "again": ["mp4", "What else?"],
    "other": ["variable", " and say."],
    "turned": ["rotated", "And now?"],
    "two": ["vp9", "or ", "hevc", "?"],
    "both": [3, "or ", "vp8", "?"],
}
#: Families of which transformers itself cannot take "both".
TAKES_ONE_KIND = ("GLM-4.1V", "GLM-4.5V", "GLM-4.6V", "LLaVA-NeXT-Video", "SmolVLM")


@pytest.fixture(scope="module", params=few(VIDEO_FAMILIES, QUICK), ids=str)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, pool: VideoPool
) -> Loaded:
    is_one = request.param.name in TAKES_ONE_KIND
    questions = {n: each for n, each in QUESTIONS.items() if n != "both" or not is_one}
    return load_media(request.param, tmp_path_factory.mktemp("family"), pool, questions)


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


def test_a_request_chooses_its_frames(loaded: Loaded, pool: VideoPool) -> None:
    for options, least, most in (
        ({"num_frames": 4}, 4, 4), ({"fps": 2.0}, 4, 4), ({"fps": 1000.0}, 16, 50), ({"num_frames": 200}, 16, 50),
    ):  # fmt: skip
        indices, made = process_video(pool, loaded.processor, "mp4", **options)
        assert least <= len(indices) == made.num_frames <= most
        assert list(indices) == sorted(indices)


def test_more_frames_than_the_limit_are_refused_by_their_field(loaded: Loaded) -> None:
    small = VideoPool(1, make_group(LimitSettings, max_video_frames=4))
    with pytest.raises(InvalidImage, match="send at most 4") as refused:
        process_video(small, loaded.processor, "mp4", fps=5.0)
    assert refused.value.param == "fps"
    indices, _ = process_video(small, loaded.processor, "mp4")
    assert len(indices) <= 4
    small.close()


def test_start_and_end_around_a_video_are_those_of_its_frames(
    pool: VideoPool, tmp_path: Path
) -> None:
    """As Qwen3-VL was trained; its published template writes them around the placeholder too."""
    prompts = []
    for number, placeholder in enumerate((RUN, "<|video_pad|>")):
        family = replace(named_video("Qwen3-VL"), video_placeholder=placeholder)
        write_checkpoint(family, tmp_path / f"{number}")
        _, processor = load(tmp_path / f"{number}")
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


def test_a_published_smolvlm_takes_videos(pool: VideoPool, tmp_path: Path) -> None:
    create = partial(smolvlm_processor, "<|im_start|>")
    write_checkpoint(video_row("SmolVLM", "", SMOLVLM, create_processor=create), tmp_path)
    (tmp_path / "chat_template.jinja").write_text(SMOLVLM_TEMPLATE)
    _, processor = load(tmp_path)
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


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"), (13, "thirteen"), (20, "twenty"), (64, "sixty-four"), (100, "one hundred"),
        (256, "two hundred and fifty-six"), (1000, "one thousand"), (1001, "one thousand and one"),
        (12345, "twelve thousand, three hundred and forty-five"),
    ],
)  # fmt: skip
def test_numbers_are_spelled_as_num2words_does(number: int, words: str) -> None:
    assert in_words(number) == words


def test_every_listed_family_is_tested() -> None:
    assert {family.architecture for family in VIDEO_FAMILIES} == TAKES_VIDEO.keys()


def test_text_follows_the_largest_position_of_a_video(pool: VideoPool, tmp_path: Path) -> None:
    """As Qwen2.5-VL was trained: 16 steps of 1/8 s with 4 positions a second, then text."""
    write_checkpoint(named_video("Qwen2.5-VL"), tmp_path)
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
    after = np.arange(len(prompt.token_ids) - stop) + largest + 1
    assert all((row[stop:] == after).all() for row in (of_time, of_rows, of_columns))


def test_positions_of_a_video_are_25_a_second_in_qwen_omni(pool: VideoPool, tmp_path: Path) -> None:
    """As it was trained: transformers assumes two frames a second, here there are four in nearly six."""
    write_checkpoint(named_video("Qwen2.5-Omni"), tmp_path)
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
