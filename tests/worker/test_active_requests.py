"""The active requests, without a worker around them."""

import asyncio

from worker.active_requests import ActiveRequests


async def test_whoever_waits_for_room_looks_again_though_nothing_was_said():
    """A step without output may end what held others up, and says nothing of it."""
    active_requests = ActiveRequests(None, None, None, 1, None)  # type: ignore[arg-type]
    async with asyncio.timeout(5.0):
        await active_requests.wait_for_change()
