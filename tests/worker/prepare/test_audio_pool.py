"""Untrusted audio is decoded to one channel at the requested rate, or refused. The next file is decoded either way."""

import io
from contextlib import closing, suppress
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from engines.base import AudioInfo, InvalidImage
from shared.protocol import ImageRef
from shared.settings.limits import LimitSettings
from tests.factories_audio import SOUNDS, make_audio, sound, tone
from tests.factories_settings import make_group
from tests.fuzzing import EDITS, edited, num_examples, takes_its_time
from worker.prepare.video_pool import VideoPool

RATE = 16_000
BAD = [name for name, (_, _, problem) in SOUNDS.items() if problem]


def decode(pool: VideoPool, data: bytes, media_type: str) -> tuple[AudioInfo, np.ndarray]:
    ref = ImageRef("", len(data), media_type, 0, 0)
    with pool.open_audio(io.BytesIO(data), ref) as audio:
        return audio.info, np.frombuffer(audio.samples(RATE), np.float32)


def named(pool: VideoPool, name: str) -> tuple[AudioInfo, np.ndarray]:
    return decode(pool, sound(name), SOUNDS[name][1])


@pytest.mark.parametrize("name", [name for name in SOUNDS if name not in BAD])
def test_decoded_samples_equal_the_encoded_ones(pool: VideoPool, name: str):
    """The best shift is searched for because codecs prepend some silence."""
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


def test_audio_longer_than_its_header_is_refused_by_its_samples():
    """The packets have no timestamps, so the limit is enforced on the decoded samples."""
    with closing(VideoPool(1, make_group(LimitSettings, max_audio_s=1.0))) as small:
        with pytest.raises(InvalidImage, match="send at most 1 s"):
            named(small, "aac")
        assert len(decode(small, make_audio(seconds=0.5), "audio/wav")[1]) == RATE // 2


@pytest.mark.parametrize(
    ("codec", "form", "media_type", "rate"),
    [
        ("libmp3lame", "mp3", "audio/mpeg", 44_100),
        ("aac", "adts", "audio/aac", 16_000),
        ("libopus", "webm", "audio/webm", 48_000),
    ],
)
def test_segments_end_in_pauses_and_join_to_the_whole(
    pool: VideoPool, codec: str, form: str, media_type: str, rate: int
):
    data = make_audio(codec, form, 26.0, rate=rate, pauses=(3.0, 8.0, 17.0))
    ref = ImageRef("", len(data), media_type, 0, 0)
    with pool.open_audio(io.BytesIO(data), ref, 10.0) as audio:
        ends = audio.info.segment_ends
    assert [round(end) for end in ends] == [8, 17, 26]
    assert 8.0 <= ends[0] <= 8.5
    whole = decode(pool, data, media_type)[1]
    parts = []
    for start, end in pairwise((0.0, *ends)):
        with pool.open_audio(io.BytesIO(data), replace(ref, start_s=start, end_s=end)) as audio:
            assert audio.info.length_s == pytest.approx(end - start)
            parts.append(np.frombuffer(audio.samples(RATE), np.float32))
        assert len(parts[-1]) / RATE == pytest.approx(end - start, abs=0.05)
    joined = np.concatenate(parts)
    assert abs(len(joined) - len(whole)) <= 2 * len(parts)
    num = min(len(joined), len(whole))
    assert np.abs(joined[:num] - whole[:num]).max() < 0.2  # the difference is 0.3 if a pause moves


@takes_its_time
@settings(max_examples=num_examples(40))
@given(
    name=st.sampled_from(["wav", "mp3", "flac", "opus", "m4a"]),
    edits=EDITS,
    start_s=st.sampled_from([0.0, 0.5, 1.5]),
)
@example("flac", [(0, 0), (17903, 27)], 0.5)  # frame times overlap
def test_audio_of_changed_bytes_is_refused_or_decoded(
    pool: VideoPool, name: str, edits: list[tuple[int, int]], start_s: float
):
    data = edited(sound(name), edits)
    ref = ImageRef("", len(data), SOUNDS[name][1], 0, 0)
    with suppress(InvalidImage):
        decode(pool, data, ref.media_type)
    with suppress(InvalidImage), pool.open_audio(io.BytesIO(data), ref, 0.6) as audio:
        ends = audio.info.segment_ends
        assert sorted(ends) == list(ends)
        assert all(end - start <= 0.6 + 1e-9 for start, end in pairwise((0.0, *ends)))
    part = replace(ref, start_s=start_s, end_s=start_s + 0.5)
    with suppress(InvalidImage), pool.open_audio(io.BytesIO(data), part) as audio:
        assert len(audio.samples(RATE)) <= 4 * RATE // 2
