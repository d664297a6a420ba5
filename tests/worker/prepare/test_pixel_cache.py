"""Decoded images: kept while they fit, made once, never half."""

import asyncio

import pytest

from worker.prepare.preparer import PixelCache


class Maker:
    """Makes pixels of ten bytes and counts."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    def __call__(self, name: str):
        async def make() -> tuple[str, int]:
            self.made.append(name)
            await self.gate.wait()
            if name == "bad":
                raise ValueError(name)
            return name.upper(), 10

        return make


@pytest.fixture
def maker() -> Maker:
    return Maker()


async def test_the_image_used_longest_ago_goes_first(maker):
    cache = PixelCache(max_bytes=20)
    for name in ("a", "b", "a", "c", "a", "b"):
        assert await cache.get(name, maker(name)) == name.upper()

    assert maker.made == ["a", "b", "c", "b"]


async def test_an_image_larger_than_the_cache_is_made_and_not_kept(maker):
    cache = PixelCache(max_bytes=5)
    for _ in range(2):
        assert await cache.get("a", maker("a")) == "A"
    assert maker.made == ["a", "a"]


async def test_equal_images_at_once_are_made_once_even_if_the_first_leaves(maker):
    cache = PixelCache(max_bytes=100)
    maker.gate.clear()
    first, second = (asyncio.create_task(cache.get("a", maker("a"))) for _ in range(2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    maker.gate.set()

    assert await second == "A"
    assert maker.made == ["a"]


async def test_a_failure_is_told_and_not_kept(maker):
    cache = PixelCache(max_bytes=100)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad"):
            await cache.get("bad", maker("bad"))
    assert maker.made == ["bad", "bad"]
