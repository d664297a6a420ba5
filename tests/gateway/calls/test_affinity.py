"""Affinity keys of requests, and reservations that the preferred worker does not claim."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.calls.models import PREFIX_CHARS, ModelDirectory, find_affinity
from shared.protocol import Call, ChatMessage, Priority, TextPart, Tokenize
from shared.queue.api import Affinity
from shared.queue.keys import RedisKeys
from shared.queue.registry import WorkerRecord
from shared.queue.worker import RedisWorkerQueue
from tests.factories_gateway import CARD, make_body
from tests.factories_images import data_url, image_part
from tests.factories_queue import MODEL, make_image, make_request

LONG = "word " * PREFIX_CHARS


def affinities(num_workers: int = 2, grace_s: float = 0.1) -> Callable[[Call], Affinity | None]:
    models = SimpleNamespace(num_workers=Counter({MODEL: num_workers}), num_seats={MODEL: 8})
    return partial(find_affinity, cast("ModelDirectory", models), grace_s)


def name(*args: Any, **changes: Any) -> str | None:
    affinity = affinities()(make_request(*args, **changes))
    return None if affinity is None else affinity.name


RED, BLUE = make_image("red"), make_image("blue")


def test_requests_with_the_same_first_image_or_long_prefix_share_an_affinity():
    assert name("what?", images=(RED,)) == name(LONG, images=(RED, BLUE))
    assert name("what?", images=(RED,)) != name("what?", images=(BLUE,))
    assert name(LONG + "what?") == name(LONG + "and why?")
    turns = tuple(ChatMessage("user", (TextPart(text),)) for text in (LONG, "and then?"))
    assert name(messages=turns) == name(messages=turns[:1])
    names = [
        name(LONG), name("other " + LONG), name(LONG, tenant="other"), name(LONG, adapter="digest"),
    ]  # fmt: skip
    assert None not in names
    assert len(set(names)) == 4


@pytest.mark.parametrize(
    ("affinities", "changes"),
    [
        (affinities(), {"text": "short"}),
        (affinities(), {"text": LONG, "priority": Priority.BATCH}),
        (affinities(), {"task": Tokenize(make_request(LONG).task)}),  # type: ignore[arg-type]
        (affinities(num_workers=1), {"text": LONG}),
        (affinities(num_workers=0), {"text": LONG}),
        (affinities(grace_s=0), {"text": LONG}),
    ],
)
def test_other_requests_have_no_affinity(affinities, changes):
    assert affinities(make_request(**changes)) is None


# With a gateway and workers


@pytest.fixture
async def absent(worker, gateway, redis, redis_blocking, redis_prefix) -> AsyncIterator[str]:
    """A second worker that polls once, so that requests can be reserved for it, and then claims none."""
    queue = RedisWorkerQueue(
        redis, redis_blocking, keys_prefix=redis_prefix, model=CARD.name, worker_id="absent",
        lease_s=10.0, max_attempts=3, batch_age_s=60.0,
    )  # fmt: skip
    assert await queue.read(1, 0.001) == []
    await worker.registry.announce(WorkerRecord("absent", CARD, "mock"), ttl_s=600)
    await gateway.services.models.refresh()
    yield "absent"
    await queue.close()


def ask_about(url: str) -> dict[str, Any]:
    return make_body([{"type": "text", "text": "what?"}, image_part(url)])


async def counts(gateway) -> dict[str, float]:
    text = (await gateway.client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("vlm_home_requests_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


@pytest.mark.parametrize("changes", [{"gateway": {"home_grace_s": 0.05}}])
async def test_another_worker_serves_an_unclaimed_reservation(gateway, absent, redis, redis_prefix):
    body = ask_about(data_url())
    assert (await gateway.chat(body)).status_code == 200
    pattern = RedisKeys(redis_prefix).preferred_worker("*", "*")
    [key] = [key async for key in redis.scan_iter(pattern)]
    assert await redis.get(key) == b"scripted"
    await redis.set(key, absent, ex=60)

    assert (await gateway.chat(body)).status_code == 200

    assert await redis.get(key) == b"scripted"
    assert await counts(gateway) == {"new": 1, "home": 1, "shared": 1}


@pytest.mark.parametrize("changes", [{"gateway": {"home_grace_s": 10.0}}])
async def test_a_preferred_worker_that_claims_in_time_gets_the_request(gateway, absent):
    body = ask_about(data_url())

    for _ in range(3):
        assert (await gateway.chat(body)).status_code == 200

    assert await counts(gateway) == {"new": 1, "home": 2}
