"""Prefix affinity: requests are reserved for the worker that last served their affinity key.

test_queue_model.py tests when requests are reserved and when a reservation ends.
"""

import asyncio

import pytest

from shared.queue.api import Affinity, Claim, Submission
from shared.queue.worker import RedisWorkerQueue
from tests.factories_queue import Ends, make_finished, make_request, publication, seal

AFFINITY = Affinity("an-image", num_workers=4, num_seats=8)


@pytest.fixture
async def workers(ends) -> tuple[RedisWorkerQueue, RedisWorkerQueue]:
    """Two workers that polled once, so that requests can be reserved for them."""
    both = ends.worker("a"), ends.worker("b")
    await both[0].create_group()
    for worker in both:
        assert await worker.read(1, 0.001) == []
    return both


async def submit(ends: Ends, *names: str, affinity: Affinity | None = AFFINITY, **options) -> str:
    choices = [seal(make_request(id=name)) for name in names]
    asked = {"timeout_s": 60.0, "max_waiting": 100, **options}
    submitted = await ends.queue.submit(Submission(choices, affinity=affinity, **asked))
    return submitted.affinity


async def serve(ends: Ends, worker: RedisWorkerQueue, name: str = "first") -> None:
    """Makes a worker the preferred one."""
    assert await submit(ends, name) == "new"
    [claim] = await worker.read(1, 1.0)
    assert await worker.publish([publication(claim, 1, 0, make_finished(claim))]) == {}


def names(claims: list[Claim]) -> list[str]:
    return [claim.id for claim in claims]


async def test_the_worker_that_last_served_the_affinity_is_preferred(ends, workers):
    a, b = workers
    await serve(ends, b)
    assert await submit(ends, "second") == "home"

    assert await a.read(1, 0.001) == []
    assert names(await b.read(1, 1.0)) == ["second"]


async def test_a_waiting_worker_is_woken_for_its_reservation(ends, workers):
    await serve(ends, workers[0])
    waiting = asyncio.create_task(workers[0].read(4, 30.0))
    await asyncio.sleep(0)  # its read is blocking, or will find the request

    assert await submit(ends, "second", "third") == "home"

    async with asyncio.timeout(20):
        assert names(await waiting) == ["second", "third"]


@pytest.mark.parametrize(
    ("affinity", "num_there", "claims"),
    [
        (Affinity("an-image", 4, 3), 3, True),
        (Affinity("an-image", 4, 100), 4, True),
        (Affinity("an-image", 2, 9), 9, True),
        (AFFINITY, 4, False),
    ],
)
async def test_a_preferred_worker_gets_at_most_its_capacity_and_twice_its_share(
    ends, workers, affinity, num_there, claims
):
    a, _ = workers
    await serve(ends, a)
    for number in range(num_there):
        assert await submit(ends, f"there-{number}", affinity=affinity) == "home"
        if claims:
            assert len(await a.read(4, 1.0)) == 1

    assert await submit(ends, "beyond", affinity=affinity) == "busy"
