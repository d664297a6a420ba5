"""Segments of audio: found for any engine that takes audio, and decoded one by one from a file that is fetched once."""

from collections.abc import Iterator
from dataclasses import replace as replace_fields
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from engines.base import Tokenization
from engines.registry import create_engine
from shared.blobs.object_store import UrlBlobReader
from shared.protocol import BlobRef, Call, ChatMessage, ImagePart, ImageRef, Tokenize
from shared.settings.limits import LimitSettings
from tests.factories_audio import make_audio
from tests.factories_queue import make_request
from worker.prepare.preparer import ImageRefused, Preprocessor
from worker.prepare.video_pool import VideoPool

LIMITS = LimitSettings()


@cache
def recording() -> bytes:
    return make_audio(seconds=70.0, rate=4000, pauses=(11.0, 22.0, 28.0, 50.0))


class Store:
    """Stands in for the blobs. `num_fetched`: how often one was asked for."""

    data = b""
    num_fetched = 0

    async def get(self, ref: BlobRef) -> bytes:
        self.num_fetched += 1
        return self.data or recording()


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
    """Of an engine that has no tokenizer."""
    engine = create_engine({"kind": "mock"}).engine
    own = replace_fields(engine.capabilities(), tasks=("generate",), max_audio_s=max_audio_s)
    monkeypatch.setattr(engine, "capabilities", lambda: own)
    pool = VideoPool(1, LIMITS)
    preprocessor = Preprocessor(engine, UrlBlobReader(store), LIMITS, 1, videos=pool)  # type: ignore[arg-type]
    yield preprocessor
    preprocessor.close()
    pool.close()
    engine.close()


def ask(tenant: str = "a", **part: float) -> Call:
    ref = ImageRef("0" * 64, 1, "audio/wav", 0, 0, param="file", **part)  # type: ignore[arg-type]
    messages = (ChatMessage("user", (ImagePart(0),)),)
    return make_request(images=(ref,), tenant=tenant, messages=messages)


def finding() -> Call:
    call = ask()
    return replace(call, task=Tokenize(call.task, finds_segments=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("max_audio_s", "ends"),
    [(1000.0, [28, 50]), (12.0, [11, 22])],
)
async def test_segments_are_of_30_s_or_of_what_the_model_takes(
    preprocessor: Preprocessor, max_audio_s: float, ends: list[int]
):
    found = await preprocessor.prepare(finding(), "r")
    assert isinstance(found, Tokenization)
    assert not found.token_ids
    lengths = [end - start for start, end in pairwise((0.0, *found.segment_ends))]
    assert max(lengths) <= min(30.0, max_audio_s) + 1e-9
    assert [round(end) for end in found.segment_ends[:2]] == ends
    assert found.segment_ends[-1] == pytest.approx(70.0, abs=0.01)


async def test_parts_of_a_file_are_fetched_once_and_are_not_each_other(
    preprocessor: Preprocessor, store: Store
):
    async def prepare(**part: Any) -> tuple[str, int]:
        [image] = (await preprocessor.prepare(ask(**part), "r")).images  # type: ignore[union-attr]
        return image.image_hash, image.num_tokens

    first = await prepare(start_s=0.0, end_s=10.0)
    assert first == await prepare(start_s=0.0, end_s=10.0)
    second = await prepare(start_s=10.0, end_s=25.0)
    assert store.num_fetched == 1
    assert (first[1], second[1]) == (100, 150)
    other = await prepare(tenant="b", start_s=0.0, end_s=10.0)
    assert store.num_fetched == 2
    assert len({first[0], second[0], other[0]}) == 3
    assert preprocessor.media.length_s == pytest.approx(35.0)


async def test_a_file_without_sound_is_refused_by_its_place(
    preprocessor: Preprocessor, store: Store
):
    store.data = b"RIFF\0\0\0\0WAVEnothing"
    with pytest.raises(ImageRefused, match="damaged"):
        await preprocessor.prepare(finding(), "r")
    assert preprocessor.media.refusals == {"file": 1}
