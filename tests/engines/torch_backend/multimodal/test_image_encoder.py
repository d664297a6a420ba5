"""The image encoder: images of any shape, NaN features, encoding in parts, and the eviction order of the cache."""

from collections.abc import Generator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engines.core.runner import SequenceFailure
from engines.core.sequence import ImageInput, ScheduledSequence
from engines.core.sequence import Sequence as EngineSequence
from engines.torch_backend.models.registry import FamilyModel
from engines.torch_backend.multimodal import image_encoder
from engines.torch_backend.multimodal.image_encoder import FEWEST_TOKENS, EncoderCache, ImageEncoder
from engines.torch_backend.step import SequenceRows
from shared.protocol import SamplingParams

CPU = torch.device("cpu")


def check_cache(cache: EncoderCache) -> None:
    """Checks that pinned images exist and that the byte count is right."""
    assert all(keys and keys <= cache._features.keys() for keys in cache._pinned.values())
    assert cache.num_bytes == sum(features.nbytes for features in cache._features.values())


class Patches(FamilyModel):
    """A model whose images are (rows * columns, 4) patches of a grid; four neighbors become one feature."""

    def num_features(self, image: ImageInput) -> int:
        return len(image.pixels) // 4

    def encode(
        self, images: Sequence[ImageInput], device: torch.device, dtype: torch.dtype
    ) -> list[Tensor]:
        patches = [torch.as_tensor(image.pixels).to(device, dtype) for image in images]
        return [rows.view(-1, 4, rows.shape[-1]).sum(dim=1) for rows in patches]


def make_image(name: str, grid: tuple[int, int], offset: int = 1) -> ImageInput:
    count = grid[0] * grid[1]
    pixels = torch.randn(count, 4, generator=torch.Generator().manual_seed(count))
    return ImageInput(offset, count // 4, name, pixels)


def make_share(request_id: str, *images: ImageInput, num_tokens: int = 12) -> ScheduledSequence:
    sampling = SamplingParams(temperature=0)
    sequence = EngineSequence(request_id, [0] * num_tokens, num_tokens, sampling, images)
    return ScheduledSequence(sequence, num_tokens)


def make_stream() -> ScheduledSequence:
    sequence = EngineSequence("stream", [0, 0], 1, SamplingParams(temperature=0))
    sequence.num_computed_tokens = 1
    return ScheduledSequence(sequence, 1)


def make_encoder() -> ImageEncoder:
    return ImageEncoder(Patches(), EncoderCache(1 << 20), 8, CPU, torch.float32)


def test_images_of_different_grids_are_encoded_together():
    small, wide = make_image("small", (2, 2)), make_image("wide", (4, 10))
    items = [make_share("a", small), make_share("b", wide)]
    encoder = make_encoder()

    encoder.encode_missing(items)
    slots = encoder.place(items, [SequenceRows(0, 12, 0, []), SequenceRows(12, 12, 0, [])])

    assert [(slot.start, len(slot.features)) for slot in slots] == [(1, 1), (13, 10)]
    expected = wide.pixels.view(10, 4, 4).sum(dim=1)
    assert torch.equal(slots[1].features, expected)


@pytest.mark.parametrize("beside_streams", [False, True])
def test_nan_features_fail_their_request_and_are_not_cached(beside_streams: bool):
    sound, bad = make_image("sound", (4, 4)), make_image("bad", (2, 2))
    hostile = ImageInput(1, 1, "bad", bad.pixels * torch.inf)
    encoder = make_encoder()
    streams = [make_stream()] if beside_streams else []

    items = [*streams, make_share("a", hostile), make_share("b", sound)]

    with pytest.raises(SequenceFailure, match="not finite") as caught:
        encoder.encode_missing(items, 5.0 if beside_streams else None)
    assert caught.value.request_id == "a"

    encoder.encode_missing([make_share("b", sound), make_share("c", bad)])
    check_cache(encoder.cache)
    assert encoder.cache.pin("c", ("", "bad")).isfinite().all()


def test_images_wait_until_the_cache_has_room():
    cache = EncoderCache(100)
    encoder = ImageEncoder(Patches(), cache, 1, CPU, torch.float32)
    seen = make_share("seen", make_image("seen", (4, 4)))
    encoder.encode_missing([seen])
    encoder.unpin_done([seen])
    waiting = [make_share(name, make_image(name, (4, 4))) for name in ("a", "b")]

    over_budget = encoder.encode_missing([*waiting, seen])[2]

    assert over_budget == {"b"}
    assert cache.is_pinned_by("seen", ("", "seen")), "what the step reads stays"
    encoder.unpin_done([waiting[0], seen])
    assert encoder.encode_missing(waiting[1:])[2] == frozenset()
    check_cache(cache)


class Slow(Patches):
    """Encodes an image in ten parts, and logs each part."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def encode_in_parts(
        self, image: ImageInput, device: torch.device, dtype: torch.dtype
    ) -> Generator[None, None, Tensor]:
        try:
            for _ in range(10):
                yield
                self.log.append(image.image_hash)
            return self.encode([image], device, dtype)[0]
        except GeneratorExit:
            self.log.append("closed")
            raise


def make_slow(monkeypatch: pytest.MonkeyPatch) -> tuple[Slow, ImageEncoder]:
    """Returns a model and an encoder with time for one part per step."""
    monkeypatch.setattr(image_encoder, "SECONDS_ALONE", 0.0)
    model = Slow()
    return model, ImageEncoder(model, EncoderCache(1 << 20), 8, CPU, torch.float32)


def test_without_streams_a_long_image_is_encoded_in_several_steps(monkeypatch: pytest.MonkeyPatch):
    _, encoder = make_slow(monkeypatch)
    items = [make_share("a", make_image("a", (2, 2)))]
    steps = 0
    while True:
        _, num_computed, over_budget = encoder.encode_missing(items, max_vision_s=0.0)
        steps += 1
        assert num_computed == dict.fromkeys(over_budget, 0)
        if not num_computed:
            break
    assert steps == 10


def make_pair(request_id: str = "a") -> ScheduledSequence:
    """Returns a prompt with an image at token 100 and another one at token 200."""
    images = make_image("first", (4, 4), 100), make_image("second", (4, 10), 200)
    return make_share(request_id, *images, num_tokens=300)


def test_a_prompt_is_computed_up_to_the_first_image_that_is_not_encoded(
    monkeypatch: pytest.MonkeyPatch,
):
    _, encoder = make_slow(monkeypatch)
    found = [encoder.encode_missing([make_pair()], max_vision_s=0.0)[1:] for _ in range(20)]
    waits = frozenset({"a"})
    assert found == [({"a": 100}, waits)] * 9 + [({"a": 200}, waits)] * 10 + [({}, frozenset())]


def test_few_tokens_before_an_image_are_computed_with_it(monkeypatch: pytest.MonkeyPatch):
    _, encoder = make_slow(monkeypatch)
    item = make_share("a", make_image("image", (4, 4), FEWEST_TOKENS - 1), num_tokens=100)
    assert encoder.encode_missing([item], max_vision_s=0.0)[1] == {"a": 0}


def test_beside_streams_a_request_computes_tokens_or_encodes_images(
    monkeypatch: pytest.MonkeyPatch,
):
    model, encoder = make_slow(monkeypatch)
    item = make_pair()
    photo = make_share("b", make_image("photo", (2, 2)))
    found = encoder.encode_missing([make_stream(), item], max_vision_s=0.0)
    assert (found[1:], model.log) == (({"a": 100}, {"a"}), [])
    encoder.encode_missing([make_stream(), item, photo], max_vision_s=0.0)
    assert model.log == ["photo"]
    item.sequence.num_computed_tokens = 100
    rest = ScheduledSequence(item.sequence, 200)
    log = [encoder.encode_missing([make_stream(), rest], max_vision_s=0.0)[1:] for _ in range(11)]
    assert model.log == ["photo", "closed"] + ["first"] * 10
    assert log == [({"a": 0}, {"a"})] * 9 + [({"a": 0}, frozenset()), ({"a": 100}, {"a"})]


def test_a_bidirectional_prompt_waits_for_all_its_images(monkeypatch: pytest.MonkeyPatch):
    model, encoder = make_slow(monkeypatch)
    model.binds_prompts = True
    assert encoder.encode_missing([make_pair()], max_vision_s=0.0)[1] == {"a": 0}


def test_the_image_of_an_ended_request_is_abandoned(monkeypatch: pytest.MonkeyPatch):
    model, encoder = make_slow(monkeypatch)
    image = make_image("image", (2, 2))
    encoder.encode_missing([make_share("a", image), make_share("b", image)], max_vision_s=0.0)
    encoder.release("a")
    assert model.log == ["image"]
    encoder.release("b")
    encoder.close()
    assert model.log == ["image", "closed"]


FEATURE_BYTES = 40


def make_cache(num_entries: int = 0, capacity: int = 2) -> EncoderCache:
    cache = EncoderCache(max_bytes=capacity * FEATURE_BYTES)
    for number in range(num_entries):
        cache.put(key(number), torch.full((10,), float(number)))
    return cache


def key(number: int) -> tuple[str, str]:
    return ("", f"hash-{number}")


def test_the_least_recently_used_image_is_evicted():
    cache = make_cache(3)
    cache.pin("a", key(0))
    cache.unpin("a", key(0))
    assert [key(number) in cache for number in range(3)] == [True, False, True]
    assert cache.num_bytes == 2 * FEATURE_BYTES


EVENTS = st.tuples(
    st.sampled_from(["read", "read", "unpin", "release"]), st.integers(0, 4), st.sampled_from("abc")
)


@settings(max_examples=60)
@given(st.lists(EVENTS, max_size=30), st.integers(0, 3))
def test_any_sequence_of_events_keeps_the_cache_consistent(events, capacity):
    cache = make_cache(capacity=capacity)
    held: set[tuple[str, int]] = set()
    for event, number, request_id in events:
        if event == "read":
            if key(number) not in cache:
                cache.put(key(number), torch.full((10,), float(number)))
            assert cache.pin(request_id, key(number))[0] == number
            held.add((request_id, number))
        elif event == "unpin":
            cache.unpin(request_id, key(number))
            held.discard((request_id, number))
        else:
            cache.release(request_id)
            held = {pair for pair in held if pair[0] != request_id}
        check_cache(cache)
        assert all(cache.is_pinned_by(owner, key(image)) for owner, image in held)
        assert all(key(image) in cache for _, image in held)
    for request_id in "abc":
        cache.release(request_id)
    cache.unpin("nobody", key(0))
    assert cache.num_bytes <= capacity * FEATURE_BYTES
