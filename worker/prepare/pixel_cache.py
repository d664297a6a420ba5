"""Images as the engine wants them, kept for those that come again; bounded in bytes."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any


class PixelCache:
    """The images used last, by hash. Equal images that come at once are made once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self._being_made: dict[str, asyncio.Task[Any]] = {}

    async def get(self, image_hash: str, make: Callable[[], Awaitable[tuple[Any, int]]]) -> Any:
        """The pixels of a hash; `make` gives them and their size where they are not here yet.

        Raises: whatever `make` raises, to everybody who waits for this image; nothing is kept then.
        """
        if image_hash in self._kept:
            self._kept.move_to_end(image_hash)
            return self._kept[image_hash][0]
        task = self._being_made.get(image_hash)
        if task is None:
            task = asyncio.create_task(self._make(image_hash, make))
            task.add_done_callback(_look_at_error)
            self._being_made[image_hash] = task
        return await asyncio.shield(task)  # who leaves does not take it from the others

    async def _make(self, image_hash: str, make: Callable[[], Awaitable[tuple[Any, int]]]) -> Any:
        try:
            pixels, num_bytes = await make()
        finally:
            del self._being_made[image_hash]
        self._kept[image_hash] = (pixels, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            _, (_, dropped_bytes) = self._kept.popitem(last=False)
            self._num_bytes -= dropped_bytes
        return pixels


def _look_at_error(task: "asyncio.Task[Any]") -> None:
    """Nobody may wait for it any more; asyncio would complain."""
    if not task.cancelled():
        task.exception()
