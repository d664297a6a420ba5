"""Untrusted videos become frames at the requested times, or are refused. The next video is decoded either way."""

import io
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engines.base import InvalidImage, VideoInfo
from engines.child_process import can_filter
from shared.protocol import FRAMES_TYPE, ImageRef, VideoOptions
from shared.settings.limits import MIB, LimitSettings
from tests.factories_settings import make_group
from tests.factories_video import CLIPS, clip, make_clip, number_of, rotated, slower_later
from tests.fuzzing import EDITS, edited, num_examples, takes_its_time
from worker.prepare.video_pool import VideoPool

BAD = [name for name, (_, _, problem) in CLIPS.items() if problem]


def decode(
    pool: VideoPool,
    data: bytes,
    media_type: str = "video/mp4",
    every: int = 1,
    pixels: tuple[int, int] = (0, 0),
    **options: float,
) -> tuple[VideoInfo, list[Image.Image]]:
    ref = ImageRef("", len(data), media_type, 0, 0, *pixels, VideoOptions(**options))  # type: ignore[arg-type]
    with pool.open(io.BytesIO(data), ref) as video:
        return video.info, video.frames(range(0, video.info.num_frames, every))


def named(pool: VideoPool, name: str, **options: Any) -> tuple[VideoInfo, list[Image.Image]]:
    return decode(pool, clip(name), CLIPS[name][1], **options)


def children() -> list[psutil.Process]:
    """Returns the running video decoders, without processes that have just ended."""
    found = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in found if "video_child" in " ".join(each.cmdline())]


def jpeg(color: str, size: tuple[int, int] = (32, 24)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "JPEG")
    return file.getvalue()


@pytest.mark.parametrize(
    "name", ["mp4", "hevc", "av1", "vp9", "vp8", "mpeg4", "mpegts", "claims 10 hours"]
)
def test_decoded_frames_equal_the_encoded_ones(pool: VideoPool, name: str):
    info, frames = named(pool, name)
    assert (info.width, info.height) == ((128, 96) if name == "av1" else (64, 48))
    assert info.num_frames == 50
    assert info.length_s == pytest.approx(2.0, abs=0.05)
    assert [number_of(frame) for frame in frames] == pytest.approx(range(50), abs=1.5)


@pytest.mark.parametrize("every", [3, 49])
def test_frames_after_skipped_ones_are_the_same(pool: VideoPool, every: int):
    for name in ("mp4", "mpegts", "vp9"):
        _, frames = decode(pool, clip(name), CLIPS[name][1], every)
        assert [number_of(f) for f in frames] == pytest.approx(range(0, 50, every), abs=1.5)


def test_a_variable_frame_rate_is_resampled(pool: VideoPool):
    """Frame i of n is the picture shown at i / n of the length."""
    info, frames = named(pool, "variable")
    assert (info.num_frames, info.length_s) == (50, pytest.approx(6.0, abs=0.25))
    shown = [slower_later(number) / 25 for number in range(50)]
    for index, frame in enumerate(frames):
        expected = max(i for i, at in enumerate(shown) if at <= index / info.fps + 1e-6)
        assert number_of(frame) == pytest.approx(expected, abs=1.5)


def test_the_rotation_of_a_video_is_applied(pool: VideoPool):
    upright, mirrored = ((0, 0), (89.99, 1), (180, 2), (270, 3)), ((0, 3), (90, 0), (180, 1))
    for degrees, corner, y in [(*row, 1) for row in upright] + [(*row, -1) for row in mirrored]:
        info, [first, *_] = decode(pool, rotated(clip("mp4"), degrees, y=y))
        is_upright = round(degrees) % 180 == 0
        assert (info.width, info.height) == first.size == ((64, 48) if is_upright else (48, 64))
        right, bottom = first.width - 4, first.height - 4
        places = ((4, 4), (right, 4), (right, bottom), (4, bottom))
        bright = [first.getpixel(place)[0] > 200 for place in places]  # type: ignore[index]
        assert (bright.count(True), bright.index(True)) == (1, corner)
    assert decode(pool, rotated(clip("mp4"), unit=0))[1][0].size == (64, 48)


def test_only_the_requested_part_of_a_video_is_decoded(pool: VideoPool):
    info, frames = named(pool, "mp4", start_s=0.8, end_s=1.2)
    assert (info.num_frames, info.length_s) == (10, pytest.approx(0.4))
    assert [number_of(frame) for frame in frames] == pytest.approx(range(20, 30), abs=1.5)
    for part, count in (({"start_s": 1.98}, 1), ({"end_s": 1e-9}, 1), ({"end_s": 1e308}, 50)):
        assert named(pool, "mp4", **part)[0].num_frames == count
    with pytest.raises(InvalidImage, match="ends before start_s"):
        named(pool, "mp4", start_s=2.0)


@pytest.mark.parametrize("name", ["one frame", "spoilt", "cut behind its index"])
def test_the_readable_frames_of_a_damaged_video_are_decoded(pool: VideoPool, name: str):
    info, frames = named(pool, name)
    assert 1 <= info.num_frames == len(frames) <= 50


@pytest.mark.parametrize("name", BAD)
def test_a_bad_video_is_refused_in_a_sentence_and_the_next_one_is_decoded(
    pool: VideoPool, name: str
):
    with pytest.raises(InvalidImage, match=CLIPS[name][2]):
        named(pool, name)
    assert named(pool, "mp4")[0].num_frames == 50


def test_a_video_that_takes_too_long_fails_alone():
    bomb = make_clip("mpeg4", size=(1920, 1080), num_frames=350, gop=9999, is_still=True)
    limits = make_group(LimitSettings, max_video_cpu_s=0.15, max_video_frames=9999)
    with closing(VideoPool(1, limits)) as hurried:
        with pytest.raises(InvalidImage, match="takes too long"):
            decode(hurried, bomb)
        assert hurried.cpu_s > 0.1
        assert named(hurried, "mp4")[0].num_frames == 50


def test_jpeg_frames_are_decoded_as_a_video(pool: VideoPool):
    frames = [jpeg(color) for color in ("red", "green", "blue")]
    info, found = decode(pool, msgspec.msgpack.encode(frames), FRAMES_TYPE, fps=2.0)
    assert (info.num_frames, info.length_s, info.is_sampled) == (3, 1.5, True)
    assert [max(range(3), key=image.getpixel((0, 0)).__getitem__) for image in found] == [0, 1, 2]  # type: ignore[union-attr]
    with pytest.raises(InvalidImage, match="send at most 3600 s") as refused:
        decode(pool, msgspec.msgpack.encode(frames), FRAMES_TYPE, fps=1e-320)
    assert (refused.value.param, named(pool, "mp4")[0].num_frames) == ("fps", 50)


def test_frames_above_the_limit_are_refused_at_any_position():
    """The limit applies to the header before decoding, and to each frame: its size can change within a stream."""
    larger = make_clip(form="mpegts", size=(80, 48))
    frames = msgspec.msgpack.encode([jpeg("red", (80, 48))])
    files = {"video/mp2t": larger, "video/mp4": make_clip(size=(80, 48)), FRAMES_TYPE: frames}
    later = make_clip(form="mpegts", size=(80, 48), times=lambda number: 50 + number)
    with closing(VideoPool(1, make_group(LimitSettings, max_image_pixels=64 * 48))) as small:
        for media_type, data in (*files.items(), ("video/mp2t", clip("mpegts") + later)):
            with pytest.raises(InvalidImage, match="of 80 x 48 are too large: send at most 3072"):
                decode(small, data, media_type)
        assert named(small, "mp4")[0].num_frames == 50


def test_frames_are_scaled_down_to_the_total_pixel_limit():
    size, count, most = (640, 360), 36, 2_000_000
    data = make_clip(num_frames=count, size=size, is_still=True)
    with closing(VideoPool(1, make_group(LimitSettings, max_video_pixels=most))) as small:
        info, frames = decode(small, data)
    assert (info.width, info.height, len(frames)) == (*size, count)
    assert 0.99 * most <= sum(frame.width * frame.height for frame in frames) <= most


def test_frames_are_scaled_to_the_limits_of_the_request(pool: VideoPool):
    for name, turned in (("mp4", False), ("rotated", True)):
        for pixels, size in (((0, 768), (32, 24)), ((12288, 0), (128, 96)), ((9, 9999), (64, 48))):
            _, [frame, *_] = decode(pool, clip(name), pixels=pixels)
            assert frame.size == (size[::-1] if turned else size)


@takes_its_time
@settings(max_examples=num_examples(40))
@given(name=st.sampled_from(["mp4", "vp9", "mpeg4", "mpegts"]), edits=EDITS)
def test_a_video_of_changed_bytes_is_refused_or_decoded(pool: VideoPool, name: str, edits):
    try:
        info, frames = decode(pool, edited(clip(name), edits), CLIPS[name][1], 10)
    except InvalidImage:
        return
    assert len(frames) == len(range(0, info.num_frames, 10))


@settings(max_examples=num_examples(25))
@given(
    fps=st.sampled_from([1, 12, 15, 24, 25, Fraction(30_000, 1001), 30, 48, 50, 60, 120]),
    num_frames=st.integers(1, 40),
)
def test_no_frame_is_seen_twice_or_left_out(pool: VideoPool, fps: Fraction | int, num_frames: int):
    for form, media_type in (("mp4", "video/mp4"), ("mpegts", "video/mp2t")):
        data = make_clip(form=form, num_frames=num_frames, fps=fps)
        _, frames = decode(pool, data, media_type)
        assert [number_of(f) for f in frames] == pytest.approx(range(num_frames), abs=1.5)


def test_many_videos_at_once_share_the_children(pool: VideoPool):
    """Each video is decoded or refused, and the confined children of the pool remain, with bounded memory."""
    bad = ["nonsense", "large frames", "sound"]
    names = ["mp4", bad[0], "large", "vp9", bad[1], "large", "hevc", bad[2]]

    def try_one(name: str) -> int | str:
        try:
            return len(named(pool, name)[1])
        except InvalidImage as error:
            return str(error)

    with ThreadPoolExecutor(len(names)) as threads:
        found = list(threads.map(try_one, names))
    for name, result in zip(names, found, strict=True):
        if name in bad:
            assert CLIPS[name][2] in str(result)
        else:
            assert result == (200 if name == "large" else 50)
    statuses = [Path(f"/proc/{child.pid}/status").read_text() for child in children()]
    assert len(statuses) == pool.num_processes
    for status in statuses:
        assert 1024 * int(status.partition("VmHWM:")[2].split()[0]) < 400 * MIB
        assert "Seccomp:\t2" in status or not can_filter()
