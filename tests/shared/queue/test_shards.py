"""Shards of one queue: placement of requests, limits of tenants, and shards that are down."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from uuid import uuid4

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from gateway.keys.usage import UsageLog, today
from shared.blobs.api import BlobsUnavailable
from shared.blobs.redis_store import ShardedBlobs
from shared.packages.store import open_store
from shared.protocol import BlobRef, seal
from shared.queue.api import (
    Affinity,
    Budget,
    Charge,
    Limits,
    QueueRefused,
    QueueUnavailable,
    Reservation,
    Submission,
    shard_of,
)
from shared.queue.shards import ShardedGatewayQueue, ShardedMailbox, Shards, check_shards
from shared.redis.embedded import EmbeddedRedis
from shared.settings import SettingsError
from shared.settings.tree import RedisSettings
from tests.factories_gateway import (
    CHAT,
    content_of,
    make_body,
    make_settings,
    run_gateway_on_socket,
    run_worker,
)
from tests.factories_queue import MODEL, make_request
from tests.waiting import until

NAMES = "abcd"


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EmbeddedRedis]]:
    with ExitStack() as stack:
        servers = [EmbeddedRedis(tmp_path_factory.mktemp(name)) for name in NAMES]
        for server in servers:
            server.start()
            stack.callback(server.stop)
        yield servers


@pytest.fixture
def settings(servers: list[EmbeddedRedis]) -> RedisSettings:
    url = ",".join(f"{name}={server.url}" for name, server in zip(NAMES, servers, strict=True))
    return RedisSettings(url=url, key_prefix=f"t{uuid4().hex[:8]}")


@pytest.fixture
async def shards(settings: RedisSettings) -> AsyncIterator[Shards]:
    shards = Shards(settings)
    yield shards
    await shards.close()


@pytest.fixture
def queue(shards: Shards) -> ShardedGatewayQueue:
    return ShardedGatewayQueue(shards)


async def submit(queue: ShardedGatewayQueue, limits: Limits | None = None, max_waiting=100) -> str:
    """Queues a request of a tenant. Returns its ID."""
    name = uuid4().hex
    call = make_request(id=name + "-0" + queue.place(name, "me", limits, None), tenant="me")
    reservation = limits and Reservation(MODEL, "me", (call.id,), 1, 1, 1, limits)
    await queue.submit(Submission([seal(call)], 60.0, max_waiting, reservation))
    return call.id


async def num_admitted(queue: ShardedGatewayQueue, limits: Limits, most: int) -> int:
    results = [submit(queue, limits, 10_000) for _ in range(most)]
    found = await asyncio.gather(*results, return_exceptions=True)
    assert all(isinstance(each, str | QueueRefused) for each in found)
    return sum(isinstance(each, str) for each in found)


async def test_a_small_limit_of_a_tenant_is_not_divided(queue):
    assert await num_admitted(queue, Limits(max_tenant_requests=63), 72) == 63


async def test_a_large_limit_of_a_tenant_is_divided(queue):
    """Each shard admits a quarter of the limit, so an uneven distribution refuses a few requests early."""
    assert 60 <= await num_admitted(queue, Limits(max_tenant_requests=100), 130) <= 100


async def test_states_are_in_the_order_of_the_calls(queue):
    ids = [await submit(queue) for _ in range(12)]
    assert len({shard_of(each) for each in ids}) > 1
    states = await queue.states(MODEL, [*ids, f"unknown-0@{NAMES[0]}"])
    assert [state and state.state for state in states] == ["queued"] * 12 + [None]
    await queue.cancel(MODEL, ids[:6])
    states = await queue.states(MODEL, ids)
    assert [state.state for state in states if state] == ["cancelled"] * 6 + ["queued"] * 6
    assert (await queue.stats(MODEL)).num_open == 6
    assert await queue.state(MODEL, "id-0@removed") is None
    with pytest.raises(QueueUnavailable, match="no shard 'removed'"):
        await queue.events(MODEL, "id-0@removed")


async def test_requests_with_one_image_are_on_one_shard(queue):
    affinity = Affinity("image", 2, 8)
    assert len({queue.place(uuid4().hex, "", None, affinity) for _ in range(20)}) == 1


async def test_a_shard_that_fails_gets_no_new_requests_until_it_answers(shards, queue):
    [down, *_] = shards.rank("name")
    down.note_failure()
    assert queue.place("name", "", None, None) != f"@{down.name}"
    assert not (await queue.stats(MODEL)).is_whole
    await until(lambda: down.is_up)
    assert (await queue.stats(MODEL)).is_whole
    assert queue.place("name", "", None, None) == f"@{down.name}"
    down.note_failure()  # a full shard responds, and its next write fails again
    began_at = time.monotonic()
    await until(lambda: down.is_up)
    assert time.monotonic() - began_at >= 1.0


async def test_a_budget_of_a_shard_that_is_down_continues_on_another(shards, queue, tmp_path):
    """The spent amount comes from the package store."""
    down, call = shards.all[1], make_request(tenant="me")
    store = await asyncio.to_thread(open_store, f"file://{tmp_path}")
    saved = b'{"": 1, "requests me tiny": 1, "cost me tiny": 5}'
    await asyncio.to_thread(store.write, f"usage/{today()}/1.json", [saved])
    down.note_failure()
    budget = Budget(today().isoformat(), most=5, reserved=1, ttl_s=60.0)
    call = replace(call, id=f"{call.id}@{NAMES[2]}")
    with pytest.raises(QueueUnavailable):  # without a store, the spent amount is unknown
        await UsageLog(queue, None).restore_budget(call, budget)
    await UsageLog(queue, store).restore_budget(call, budget)
    with pytest.raises(QueueRefused, match="key_budget"):
        await queue.submit(Submission([seal(call)], 60.0, 9, charge=Charge(budget=budget)))


async def test_a_blob_is_found_on_any_shard(shards, settings, monkeypatch):
    blobs = ShardedBlobs(shards, settings.key_prefix)
    ref = await blobs.put(b"an image", "a", ttl_s=60.0)
    first = shards.rank(ref.sha256)[0]
    first.note_failure()
    with pytest.raises(BlobsUnavailable, match="down"):
        await blobs.get(ref)
    await blobs.put(b"an image", "b", ttl_s=60.0)  # stored on another shard
    assert await blobs.get(ref) == b"an image"
    monkeypatch.setattr("shared.queue.shards.LOST_AFTER_S", 0.0)
    assert await blobs.get(BlobRef("0" * 64, 1)) is None  # does not wait for the shard that is down
    await until(lambda: first.is_up)
    await blobs.release("a", [ref])
    assert await blobs.get(ref) == b"an image"
    assert await blobs.hold(ref, "c", ttl_s=60.0)
    await blobs.close()


async def test_a_shard_that_is_down_at_startup_is_used_once_it_is_up(servers, tmp_path):
    late = EmbeddedRedis(tmp_path / "late")  # not started yet
    settings = RedisSettings(url=f"a={servers[0].url},b={late.url}")
    shards, gaps = Shards(settings), []
    queue = ShardedGatewayQueue(shards)
    mailbox = ShardedMailbox(shards, settings, "gateway", gaps.append, lambda model: True)
    try:
        await mailbox.open([MODEL])
        for _ in range(9):
            assert shard_of(await submit(queue)) == "a"
        events = mailbox.events()
        reading = asyncio.ensure_future(anext(events))
        await asyncio.to_thread(late.start)
        await until(lambda: MODEL in gaps)
        await until(lambda: all(shard.is_up for shard in shards.all))
        placed = set()
        while len(placed) < 2:
            placed.add(shard_of(await submit(queue)))
        reading.cancel()
    finally:
        await mailbox.close()
        await queue.close()
        late.stop()


async def test_removing_a_shard_that_can_have_requests_is_refused_at_startup(
    settings, shards, queue
):
    while shard_of(await submit(queue)) != "d":
        pass
    await check_shards(settings)
    await shards.all[0].queue.note_shard("d", 1.0)  # by a gateway with shorter timeouts
    fewer = settings.model_copy(update={"url": settings.url.rpartition(",d=")[0]})
    with pytest.raises(SettingsError, match=r"^VLM_REDIS_URL: the shard d is missing"):
        await check_shards(fewer)


async def test_another_gateway_joins_a_request_of_any_shard(settings):
    """A retry with the same Idempotency-Key gets the first response from any shard; streams are resumed by ID."""
    of_gateway = make_settings("", settings.key_prefix)
    of_gateway = of_gateway.model_copy(update={"redis": settings})
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(run_worker(each.url, settings.key_prefix))
            for each in settings.shards.values()
        ]
        one, other = [
            await stack.enter_async_context(run_gateway_on_socket(of_gateway)) for _ in range(2)
        ]
        for number in range(8):
            headers = {"idempotency-key": f"key-{number}", "x-vlm-resumable": "true"}
            body = make_body(stream=True)
            answers = [
                await each.client.post(CHAT, json=body, headers=headers) for each in (one, other)
            ]
            assert [answer.status_code for answer in answers] == [200, 200]
            where = answers[0].headers["x-vlm-stream"]
            again = await other.client.get(where)
            texts = [content_of(answer.text) for answer in (*answers, again)]
            assert texts[0]
            assert texts == [texts[0]] * 3
        assert sum(len(worker.answers) for worker in workers) == 8
        assert sum(len(worker.answers) > 0 for worker in workers) > 1


def test_invalid_shard_settings_are_refused():
    for url, problem in (
        ("a=redis://one,a=redis://two", "a name that two shards share"),
        ("redis://one,b=redis://two", "text before the first shard"),
        ("a=redis://one,b=redis://", "not a Redis URL"),
        ("A=redis://one", "not a Redis URL"),
    ):
        with pytest.raises(ValidationError, match=problem):
            RedisSettings(url=url)
