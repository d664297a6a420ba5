"""Prefix affinity, on a real Redis server: requests are reserved for the worker that last served their affinity key."""

import asyncio

import pytest

from shared.queue.api import Affinity, Claim, Submission
from shared.queue.keys import GROUP
from shared.queue.worker import RedisWorkerQueue
from tests.factories_queue import MODEL, Ends, make_finished, make_request, publication, seal

AFFINITY = Affinity("an-image", num_workers=4, num_seats=8)


@pytest.fixture
async def workers(ends) -> tuple[RedisWorkerQueue, RedisWorkerQueue]:
    """Two workers that have read once, so that requests may be reserved for them."""
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


async def end(worker: RedisWorkerQueue, claim: Claim) -> None:
    assert await worker.publish([publication(claim, 1, 0, make_finished(claim))]) == {}


async def serve(ends: Ends, worker: RedisWorkerQueue, name: str = "first") -> None:
    """Make a worker the preferred one."""
    await submit(ends, name)
    [claim] = await worker.read(1, 1.0)
    await end(worker, claim)


def names(claims: list[Claim]) -> list[str]:
    return [claim.id for claim in claims]


async def test_the_worker_that_last_served_the_affinity_is_preferred(ends, workers):
    a, b = workers
    assert await submit(ends, "first") == "new"
    [claim] = await b.read(1, 1.0)
    await end(b, claim)

    assert await submit(ends, "second") == "home"

    assert await a.read(1, 0.001) == []
    assert names(await b.read(1, 1.0)) == ["second"]


async def test_a_worker_that_waits_is_woken(ends, workers):
    await serve(ends, workers[0])
    waiting = asyncio.create_task(workers[0].read(4, 30.0))
    await asyncio.sleep(0)  # its read is on the way, or will find the request there

    assert await submit(ends, "second", "third") == "home"

    async with asyncio.timeout(20):
        assert names(await waiting) == ["second", "third"]


async def test_one_read_returns_reserved_requests_and_requests_for_any_worker(ends, workers):
    await serve(ends, workers[0])
    await submit(ends, "second")
    await submit(ends, "plain", affinity=None)

    assert names(await workers[0].read(4, 1.0)) == ["second", "plain"]


async def test_the_next_worker_that_serves_the_affinity_becomes_preferred(ends, workers):
    a, b = workers
    await serve(ends, a)
    await submit(ends, "second")
    assert await ends.queue.share(MODEL, ["second"]) == 1
    assert names(await b.read(1, 1.0)) == ["second"]

    await submit(ends, "third")

    assert await a.read(1, 0.001) == []
    assert names(await b.read(1, 1.0)) == ["third"]


async def test_a_shared_request_is_no_longer_reserved(ends, workers):
    a, b = workers
    await serve(ends, a)
    await submit(ends, "second")

    assert await ends.queue.share(MODEL, ["second", "unknown"]) == 1

    assert await ends.queue.share(MODEL, ["second"]) == 0
    assert await a.reconcile() == []
    assert names(await b.read(2, 1.0)) == ["second"]
    assert await ends.num_open() == 1


async def test_nothing_is_reserved_for_a_worker_that_leaves(ends, workers):
    a, b = workers
    await serve(ends, a)
    await submit(ends, "second")

    await a.leave()

    assert await submit(ends, "third") == "busy"  # what it gave back waits for the others
    assert sorted(names(await b.read(4, 1.0))) == ["second", "third"]


async def test_nothing_is_reserved_for_a_worker_that_is_gone(ends, workers):
    await serve(ends, workers[0])
    # as it does by itself when nobody renews it
    await ends.redis.delete(ends.keys.wakeups(MODEL, "a"))

    assert await submit(ends, "second") == "gone"

    assert names(await workers[1].read(1, 1.0)) == ["second"]


async def test_a_worker_gets_reservations_again_after_its_wakeups_were_lost(ends, workers):
    await serve(ends, workers[0])
    await ends.redis.delete(ends.keys.wakeups(MODEL, "a"))

    for _ in range(3):  # it creates the stream again
        assert await workers[0].read(1, 0.001) == []

    assert await submit(ends, "second") == "home"
    assert names(await workers[0].read(1, 1.0)) == ["second"]


async def test_nothing_is_reserved_while_other_requests_wait(ends, workers):
    await serve(ends, workers[0])
    await submit(ends, "plain", affinity=None)

    assert await submit(ends, "second") == "busy"

    assert names(await workers[1].read(4, 1.0)) == ["plain", "second"]


@pytest.mark.parametrize(
    ("affinity", "num_there"),
    [
        (Affinity("an-image", 4, 3), 3),
        (Affinity("an-image", 4, 100), 4),
        (Affinity("an-image", 2, 9), 9),
    ],
)
async def test_a_preferred_worker_gets_at_most_its_capacity_and_twice_its_share(
    ends, workers, affinity, num_there
):
    a, _ = workers
    await serve(ends, a)
    for number in range(num_there):
        assert await submit(ends, f"there-{number}", affinity=affinity) == "home"
        assert len(await a.read(4, 1.0)) == 1

    assert await submit(ends, "beyond", affinity=affinity) == "busy"


async def test_a_worker_that_does_not_claim_gets_no_more_than_its_share(ends, workers):
    await serve(ends, workers[0])

    outcomes = [await submit(ends, f"r-{number}") for number in range(5)]

    assert outcomes == ["home"] * 4 + ["busy"]


async def test_a_reservation_for_a_dead_worker_is_taken_over_without_a_crash_count(ends, workers):
    """The gateway that would have shared the request is dead too."""
    a, b = workers
    await serve(ends, a)
    await submit(ends, "second")
    [entry] = await ends.redis.xpending_range(ends.keys.queue(MODEL), GROUP, "-", "+", 9)
    await ends.redis.xclaim(
        *(ends.keys.queue(MODEL), GROUP, "a", 0, [entry["message_id"]]), idle=3_600_000, justid=True
    )

    [claim] = await b.reclaim(1)

    assert (claim.id, claim.attempt, claim.failures) == ("second", 1, 0)
