"""The oracle notices every broken law, and is content with a history that breaks none."""

import os
import threading

import pytest

from shared.queue.keys import RedisKeys
from tests.factories_queue import MODEL, make_finished, open_ends, publication
from tests.faults.history import (
    CANCELLED,
    FAILED,
    FINISHED,
    REFUSED,
    History,
    Sight,
    conservation,
)
from tests.faults.rest import MIB, Resources, growth, redis_leftovers
from tests.faults.vectors import StoreHistory, Write

ANSWER = ["a", "b", "c", "d", "e"]
OTHER = ["v", "w", "x", "y", "z"]


def whole(request: str = "r", answer: list[str] = ANSWER, end: str = FINISHED) -> list[Sight]:
    """An answer as it should come."""
    tokens = [Sight(request, 0.1 * i, i, t, answer_id=request) for i, t in enumerate(answer)]
    return [*tokens, Sight(request, 1.0, terminal=end, answer_id=request)]


def told(sights: list[Sight]) -> list[str]:
    history = History()
    history.ask("r", 5.0, ANSWER)
    history.ask("s", 5.0, OTHER)
    for sight in [*sights, *whole("s", OTHER)]:
        history.see(sight)
    return history.violations()


@pytest.mark.parametrize(
    ("sights", "law"),
    [
        ([], "P1 r: 0 ends"),
        (whole()[:-1], "P1 r: 0 ends"),
        ([*whole(), Sight("r", 1.1, terminal=FAILED)], "P1 r: 2 ends"),
        ([*whole()[:-1], Sight("r", 7.5, terminal=FINISHED)], "after its deadline"),
        ([*whole(), Sight("r", 1.1, 5, "f")], "P1 r: tokens after its end"),
        (whole(end=REFUSED), "refused after it had begun"),
        ([whole()[0], *whole()[2:]], "P2 r: token indexes are [0, 2, 3, 4]"),
        ([whole()[0], *whole()], "P2 r: token indexes are [0, 0, 1, 2, 3, 4]"),
        (whole(answer=["a", "B", "c", "d", "e"]), "P3 r:"),
        (whole(answer=ANSWER[:4]), "P3 r:"),
        (whole(answer=["B"], end=FAILED), "P3 r:"),
        (whole(answer=["a", *OTHER[1:]]), "P8 r: holds tokens of s"),
        ([whole("s")[0], *whole()], "P8 answer s went to several requests"),
        ([Sight("q", 0.0, terminal=FINISHED), *whole()], "q: nobody asked it"),
    ],
)
def test_a_broken_law_is_named(sights, law):
    if law.startswith("P8 answer"):
        sights = [Sight("r", 0.0, 0, "a", answer_id="s"), *whole()[1:]]
    assert any(law in violation for violation in told(sights)), told(sights)


def test_pieces_of_two_answers_in_one_stream_are_named():
    sights = whole()
    sights[2] = Sight("r", 0.2, 2, "c", answer_id="elsewhere")
    assert "P8 r: pieces of several answers: ['elsewhere', 'r']" in told(sights)


def test_the_longest_pause_is_within_one_request():
    history = History()
    for request, times in {"r": (0.0, 1.0, 4.5), "s": (9.0, 9.5)}.items():
        history.ask(request, 20.0)
        for at in times:
            history.see(Sight(request, at))
    assert history.longest_pause_s() == 3.5


def test_what_is_accepted_must_end():
    assert conservation(3, {FINISHED: 1, FAILED: 1, CANCELLED: 1, REFUSED: 7}) == []
    assert conservation(3, {FINISHED: 2}) != []
    assert conservation(1, {FINISHED: 2}) != []


STORE = StoreHistory(
    [
        Write({"a": "1", "b": "1"}, is_acknowledged=True),
        Write({"a": "2", "c": "2"}),
        Write({"d": "3", "e": "3"}),
    ]
)


@pytest.mark.parametrize(
    ("stored", "law"),
    [
        ([("a", "1")], "b is ''"),
        ([("a", "1"), ("b", "0")], "b is '0'"),
        ([("a", "1"), ("b", "1"), ("b", "1")], "b is there 2 times"),
        ([("a", "1"), ("b", "1"), ("c", "2")], "a part of one write is there"),
        ([("a", "1"), ("b", "1"), ("d", "3")], "a part of one write is there"),
        ([("a", "1"), ("b", "1"), ("f", "1")], "nobody wrote f"),
    ],
)
def test_a_broken_law_of_a_store_is_named(stored, law):
    assert any(law in violation for violation in STORE.violations(stored))


async def test_redis_at_rest_holds_nothing_of_a_request_that_has_ended(
    redis, redis_blocking, redis_prefix
):
    async with open_ends(redis, redis_blocking, redis_prefix) as ends:
        worker = ends.worker("w")
        request = await ends.enqueue()
        key = RedisKeys(redis_prefix).request(MODEL, request.id)
        assert any(f"{key} is still queued" in word for word in await _left(ends))

        claim = await ends.claim(worker)
        words = await _left(ends)
        assert any("has 1 pending" in word for word in words)
        assert any("holds 1 requests" in word for word in words)
        assert any(f"{key} is still running" in word for word in words)

        await worker.publish([publication(claim, 1, 0, make_finished(claim))])
        assert await _left(ends) == []

        await redis.persist(key)
        assert await _left(ends) == [f"{key} never expires"]


async def _left(ends) -> list[str]:
    return await redis_leftovers(ends.redis, ends.prefix)


def test_what_a_process_keeps_is_named():
    before = Resources.of(os.getpid())
    assert growth(before, Resources.of(os.getpid())) == []
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(5)]
    pipes = [os.pipe() for _ in range(3)]
    for thread in threads:
        thread.start()
    words = growth(before, Resources.of(os.getpid()))
    stop.set()
    for thread in threads:
        thread.join()
    for end in (end for pipe in pipes for end in pipe):
        os.close(end)
    assert [word.split()[0] for word in words] == ["num_threads", "num_files"]
    fat = Resources(1, 1, 1, before.rss_bytes + 33 * MIB)
    assert growth(Resources(1, 1, 1, before.rss_bytes), fat) == ["memory grew by 33 MiB"]
