"""Picture features stay while they are read, and leave in the order of their last use."""

import pytest
import torch

from engines.torch_backend.encoder_cache import EncoderCache

FEATURE_BYTES = 40


def make_cache(num_entries: int = 0, capacity: int = 2) -> EncoderCache:
    cache = EncoderCache(max_bytes=capacity * FEATURE_BYTES)
    for number in range(num_entries):
        cache.put(key(number), torch.full((10,), float(number)))
    return cache


def key(number: int) -> tuple[str, str]:
    return ("", f"hash-{number}")


def test_features_come_back_as_they_were_put():
    cache = make_cache(2)
    assert cache.pin("a", key(1)).tolist() == [1.0] * 10


def test_a_picture_that_is_not_here_is_a_key_error():
    with pytest.raises(KeyError):
        make_cache().pin("a", key(0))


def test_the_longest_unused_picture_leaves_first():
    cache = make_cache(3)
    cache.pin("a", key(0))
    cache.unpin("a", key(0))
    assert [key(number) in cache for number in range(3)] == [True, False, True]
    assert cache.num_bytes == 2 * FEATURE_BYTES


def test_a_pinned_picture_stays_beyond_the_limit():
    cache = make_cache(2, capacity=0)
    cache.pin("a", key(0))
    cache.pin("b", key(0))
    cache.unpin("a", key(0))
    assert key(0) in cache
    assert key(1) not in cache
    cache.unpin("b", key(0))
    assert cache.num_bytes == len(cache) == 0


def test_release_lets_go_of_all_that_a_request_holds():
    cache = make_cache(2, capacity=0)
    cache.pin("a", key(0))
    cache.pin("a", key(1))
    cache.release("a")
    cache.release("a")
    assert len(cache) == 0
    assert not cache.is_pinned_by("a", key(0))


def test_tenants_with_different_salts_share_nothing():
    cache = make_cache()
    cache.put(("mine", "hash"), torch.zeros(10))
    assert ("yours", "hash") not in cache
