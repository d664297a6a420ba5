"""Image features stay while they are read, and leave in the order of their last use."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.torch_backend.multimodal.encoder_cache import EncoderCache

FEATURE_BYTES = 40


def make_cache(num_entries: int = 0, capacity: int = 2) -> EncoderCache:
    cache = EncoderCache(max_bytes=capacity * FEATURE_BYTES)
    for number in range(num_entries):
        cache.put(key(number), torch.full((10,), float(number)))
    return cache


def key(number: int) -> tuple[str, str]:
    return ("", f"hash-{number}")


def test_an_image_that_is_not_here_is_a_key_error():
    with pytest.raises(KeyError):
        make_cache().pin("a", key(0))


def test_the_longest_unused_image_leaves_first():
    cache = make_cache(3)
    cache.pin("a", key(0))
    cache.unpin("a", key(0))
    assert [key(number) in cache for number in range(3)] == [True, False, True]
    assert cache.num_bytes == 2 * FEATURE_BYTES


def test_tenants_with_different_salts_share_nothing():
    cache = make_cache()
    cache.put(("mine", "hash"), torch.zeros(10))
    assert ("yours", "hash") not in cache


EVENTS = st.tuples(
    st.sampled_from(["read", "read", "unpin", "release"]), st.integers(0, 4), st.sampled_from("abc")
)


@settings(max_examples=60, deadline=None)
@given(st.lists(EVENTS, max_size=30), st.integers(0, 3))
def test_whatever_happens_the_books_are_right_and_what_is_read_is_there(events, capacity):
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
        cache.check_integrity()
        assert all(cache.is_pinned_by(owner, key(image)) for owner, image in held)
        assert all(key(image) in cache for _, image in held)
    for request_id in "abc":
        cache.release(request_id)
    cache.unpin("nobody", key(0))
    assert cache.num_bytes <= capacity * FEATURE_BYTES
