"""Videos and audio are fetched and decoded once: keys of cache entries, and segments for engines that accept audio."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace as replace_fields
from functools import cache
from hashlib import sha256
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from engines.base import Tokenization
from engines.registry import create_engine
from shared.blobs.object_store import UrlBlobReader
from shared.protocol import (
    BlobRef,
    Call,
    ChatMessage,
    ImagePart,
    ImageRef,
    TextPart,
    Tokenize,
    VideoOptions,
)
from shared.settings.limits import LimitSettings
from tests.factories_audio import make_audio
from tests.factories_queue import make_request
from tests.factories_settings import make_group
from tests.factories_video import CLIPS, clip
from worker.prepare.preparer import ImageRefused, Preprocessor
from worker.prepare.video_pool import VideoPool

LIMITS = make_group(LimitSettings, max_video_frames=40)


@cache
def recording() -> bytes:
    return make_audio(seconds=70.0, rate=4000, pauses=(11.0, 22.0, 28.0, 50.0))


def digest_of(name: str) -> str:
    return sha256(name.encode()).hexdigest()


class Store:
    """Stands in for the blob store: clips and a recording, by the digest of their name."""

    num_fetched = 0

    async def get(self, ref: BlobRef) -> bytes:
        self.num_fetched += 1
        names = {digest_of(name): name for name in (*CLIPS, "recording", "noise")}
        name = names[ref.sha256]
        if name in CLIPS:
            return clip(name)
        return recording() if name == "recording" else b"RIFF\0\0\0\0WAVEnothing"


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def max_audio_s() -> float:
    return 1000.0


@pytest.fixture
def preprocessor(
    store: Store, max_audio_s: float, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Preprocessor]:
    """The preprocessor of an engine without a tokenizer."""
    engine = create_engine({"kind": "mock"}).engine
    own = replace_fields(engine.capabilities(), tasks=("generate",), max_audio_s=max_audio_s)
    monkeypatch.setattr(engine, "capabilities", lambda: own)
    with closing(engine), closing(VideoPool(1, LIMITS)) as pool:
        reader = UrlBlobReader(store)  # type: ignore[arg-type]
        with closing(Preprocessor(engine, reader, LIMITS, 1, videos=pool)) as preprocessor:
            yield preprocessor


def ask(ref: ImageRef, tenant: str = "a", text: str = "?") -> Call:
    messages = (ChatMessage("user", (ImagePart(0), TextPart(text))),)
    return make_request(images=(ref,), tenant=tenant, messages=messages)


def audio(name: str = "recording", **part: Any) -> ImageRef:
    return ImageRef(digest_of(name), 1, "audio/wav", 0, 0, param="file", **part)


async def prepare(preprocessor: Preprocessor, ref: ImageRef, **changes: str) -> Any:
    [image] = (await preprocessor.prepare(ask(ref, **changes), "r")).images  # type: ignore[union-attr]
    return image


async def video(
    preprocessor: Preprocessor, *, name: str = "mp4", max_pixels: int = 0, tenant: str = "a", text: str = "?",
    **options: Any,
) -> str:  # fmt: skip
    """Prepares a video with these options; returns its hash."""
    video = VideoOptions(**options)
    ref = ImageRef(digest_of(name), 1, CLIPS[name][1], 0, 0, 0, max_pixels, video)
    return (await prepare(preprocessor, ref, tenant=tenant, text=text)).image_hash


def finding(name: str = "recording") -> Call:
    call = ask(audio(name))
    return replace(call, task=Tokenize(call.task, finds_segments=True))  # type: ignore[arg-type]


async def test_equal_frames_of_a_file_have_one_hash_for_any_options(preprocessor):
    first = await video(preprocessor, num_frames=4)
    assert preprocessor.media.length_s == pytest.approx(2.0)
    assert await video(preprocessor, num_frames=4, text="And now?") == first
    assert preprocessor.media.length_s == pytest.approx(2.0)  # not decoded again
    for same in ({"fps": 2.0}, {"num_frames": 4, "max_pixels": 9999}):
        assert await video(preprocessor, **same) == first
    for other in (
        {"num_frames": 5}, {"fps": 2.0, "start_s": 1.0}, {}, {"num_frames": 4, "name": "vp9"},
        {"num_frames": 4, "max_pixels": 999}, {"num_frames": 4, "tenant": "b"},
    ):  # fmt: skip
        assert await video(preprocessor, **other) != first
    half = await video(preprocessor, num_frames=4, end_s=1.0)
    assert await video(preprocessor, num_frames=4, start_s=1.0, end_s=2.0) != half


async def test_refusals_are_counted_by_reason(preprocessor):
    for options in ({"start_s": 9.0}, {"fps": 999.0}, {"name": "nonsense"}, {"name": "sound"}):
        with pytest.raises(ImageRefused):
            await video(preprocessor, **options)
    assert preprocessor.media.refusals == {"start_s": 1, "fps": 1, "file": 2}
    assert preprocessor.media.decode_s == preprocessor.videos.cpu_s > 0


@pytest.mark.parametrize(("max_audio_s", "ends"), [(1000.0, [28, 50]), (12.0, [11, 22])])
async def test_segments_have_30_s_or_the_models_limit(preprocessor, max_audio_s, ends):
    found = await preprocessor.prepare(finding(), "r")
    assert isinstance(found, Tokenization)
    assert not found.token_ids
    lengths = [end - start for start, end in pairwise((0.0, *found.segment_ends))]
    assert max(lengths) <= min(30.0, max_audio_s) + 1e-9
    assert [round(end) for end in found.segment_ends[:2]] == ends
    assert found.segment_ends[-1] == pytest.approx(70.0, abs=0.01)


async def test_parts_of_a_file_are_fetched_once_and_have_different_hashes(preprocessor, store):
    first = await prepare(preprocessor, audio(start_s=0.0, end_s=10.0))
    again = await prepare(preprocessor, audio(start_s=0.0, end_s=10.0))
    second = await prepare(preprocessor, audio(start_s=10.0, end_s=25.0))
    assert store.num_fetched == 1
    assert first.image_hash == again.image_hash
    assert (first.num_tokens, second.num_tokens) == (100, 150)
    other = await prepare(preprocessor, audio(start_s=0.0, end_s=10.0), tenant="b")
    assert store.num_fetched == 2
    assert len({first.image_hash, second.image_hash, other.image_hash}) == 3
    assert preprocessor.media.length_s == pytest.approx(35.0)
