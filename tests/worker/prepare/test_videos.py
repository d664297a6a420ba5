"""A video is decoded once: its cache key is the file, the frames and the tenant, not the way they were requested."""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import pytest

from engines.registry import create_engine
from shared.blobs.object_store import UrlBlobReader
from shared.protocol import BlobRef, ChatMessage, ImagePart, ImageRef, TextPart, VideoOptions
from shared.settings.limits import LimitSettings
from tests.factories_queue import make_request
from tests.factories_settings import make_group
from tests.factories_video import CLIPS, clip
from worker.prepare.preparer import ImageRefused, Preprocessor
from worker.prepare.video_pool import VideoPool

LIMITS = make_group(LimitSettings, max_video_frames=40)


class Store:
    """Stands in for the blobs: each is a clip."""

    async def get(self, ref: BlobRef) -> bytes:
        return next(clip(name) for name in CLIPS if sha256(name.encode()).hexdigest() == ref.sha256)


@pytest.fixture
def preprocessor() -> Iterator[Preprocessor]:
    loaded = create_engine({"kind": "mock"})
    pool = VideoPool(1, LIMITS)
    preprocessor = Preprocessor(loaded.engine, UrlBlobReader(Store()), LIMITS, 1, videos=pool)  # type: ignore[arg-type]
    yield preprocessor
    preprocessor.close()
    pool.close()
    loaded.engine.close()


async def prepare(
    preprocessor: Preprocessor,
    tenant: str = "a",
    name: str = "mp4",
    text: str = "?",
    max_pixels: int = 0,
    **options: Any,
) -> Any:
    digest = sha256(name.encode()).hexdigest()
    ref = ImageRef(digest, 1, CLIPS[name][1], 0, 0, 0, max_pixels, VideoOptions(**options))
    messages = (ChatMessage("user", (ImagePart(0), TextPart(text))),)
    request = make_request(images=(ref,), tenant=tenant, messages=messages)
    return (await preprocessor.prepare(request, "r")).images[0]  # type: ignore[union-attr]


async def test_the_same_frames_of_a_file_are_one_video(preprocessor: Preprocessor):
    first = await prepare(preprocessor, num_frames=4)
    by_rate = await prepare(preprocessor, fps=2.0)
    assert by_rate.image_hash == first.image_hash
    for others in ({"num_frames": 5}, {"fps": 2.0, "start_s": 1.0}, {}):
        assert (await prepare(preprocessor, **others)).image_hash != first.image_hash
    assert (await prepare(preprocessor, name="vp9", num_frames=4)).image_hash != first.image_hash
    assert (
        await prepare(preprocessor, max_pixels=9999, num_frames=4)
    ).image_hash == first.image_hash
    smaller = await prepare(preprocessor, max_pixels=999, num_frames=4)
    assert smaller.image_hash != first.image_hash
    assert (await prepare(preprocessor, tenant="b", num_frames=4)).image_hash != first.image_hash


async def test_another_question_decodes_nothing(preprocessor: Preprocessor):
    first = await prepare(preprocessor)
    decoded = preprocessor.media.length_s
    assert decoded == pytest.approx(2.0)
    second = await prepare(preprocessor, text="And now?")
    assert second.image_hash == first.image_hash
    assert preprocessor.media.length_s == decoded


async def test_refusals_are_counted_by_reason(preprocessor: Preprocessor):
    for bad in ({"name": "nonsense"}, {"fps": 25.0}, {"start_s": 9.0}):
        with pytest.raises(ImageRefused):
            await prepare(preprocessor, **bad)
    assert preprocessor.media.refusals == {"file": 1, "fps": 1, "start_s": 1}
