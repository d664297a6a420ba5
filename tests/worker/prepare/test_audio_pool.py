"""Audio of strangers: one channel at the wanted rate, or a sentence; the next file is decoded either way."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.base import AudioInfo, InvalidImage
from shared.protocol import ImageRef, VideoOptions
from shared.settings.limits import LimitSettings
from tests.factories_audio import SOUNDS, make_audio, sound, tone
from tests.factories_settings import make_group
from tests.factories_video import clip
from tests.fuzzing import num_examples, takes_its_time
from worker.prepare.video_pool import VideoPool

RATE = 16_000
BAD = [name for name, (_, _, problem) in SOUNDS.items() if problem]


@pytest.fixture(scope="module")
def pool() -> Iterator[VideoPool]:
    pool = VideoPool(1, LimitSettings())
    yield pool
    pool.close()


def decode(pool: VideoPool, data: bytes, media_type: str) -> tuple[AudioInfo, np.ndarray]:
    ref = ImageRef("", len(data), media_type, 0, 0)
    with pool.open_audio(data, ref) as audio:
        return audio.info, np.frombuffer(audio.samples(RATE), np.float32)


def named(pool: VideoPool, name: str) -> tuple[AudioInfo, np.ndarray]:
    return decode(pool, sound(name), SOUNDS[name][1])


@pytest.mark.parametrize("name", [name for name in SOUNDS if name not in BAD])
def test_samples_are_those_that_were_written(pool: VideoPool, name: str):
    """The best shift is looked for, as codecs add some silence in front."""
    info, samples = named(pool, name)
    assert info.length_s == pytest.approx(2.0, abs=0.1)
    assert len(samples) / RATE == pytest.approx(2.0, abs=0.1)
    expected = tone(2.0, RATE)[0]
    padded = np.pad(samples, (0, len(expected)))
    likeness = [
        np.corrcoef(padded[shift : shift + len(expected)], expected)[0, 1]
        for shift in range(0, 1600)
    ]
    assert max(likeness) > 0.9


@pytest.mark.parametrize("name", BAD)
def test_bad_audio_is_refused_in_a_sentence_and_the_next_file_is_decoded(
    pool: VideoPool, name: str
):
    with pytest.raises(InvalidImage, match=SOUNDS[name][2]):
        named(pool, name)
    assert named(pool, "wav")[0].length_s == pytest.approx(2.0)


def test_videos_and_audio_share_the_children(pool: VideoPool):
    named(pool, "mp3")
    video = ImageRef("", 1, "video/mp4", 0, 0, video=VideoOptions())
    with pool.open(clip("mp4"), video) as opened:
        assert len(opened.frames([0, 1])) == 2
    with pool.open_audio(sound("wav"), ImageRef("", 1, "audio/wav", 0, 0)) as audio:
        assert audio.info.num_channels == 1  # its samples are not asked for
    assert len(named(pool, "wav")[1]) == 2 * RATE


def test_audio_longer_than_its_header_says_is_refused_by_its_samples():
    """Its packets have no timestamps, so the limit is enforced on the decoded samples."""
    small = VideoPool(1, make_group(LimitSettings, max_audio_s=1.0))
    try:
        with pytest.raises(InvalidImage, match="send at most 1 s"):
            named(small, "aac")
        assert len(decode(small, make_audio(seconds=0.5), "audio/wav")[1]) == RATE // 2
    finally:
        small.close()


@takes_its_time
@settings(deadline=None, max_examples=num_examples(40))
@given(
    name=st.sampled_from(["wav", "mp3", "flac", "opus", "m4a"]),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8),
)
def test_audio_of_changed_bytes_is_refused_or_decoded(pool: VideoPool, name: str, edits):
    data = bytearray(sound(name))
    for place, value in edits:
        data[place % len(data)] = value
    try:
        decode(pool, bytes(data), SOUNDS[name][1])
    except InvalidImage:
        return
