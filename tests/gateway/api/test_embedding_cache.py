"""Equal inputs are computed once, also through two gateways and if a client leaves, but never shared by tenants."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from tests.factories_gateway import make_settings, run_gateway_on_socket
from tests.factories_numbers import EMBEDDINGS, load, read_vectors, run_fleet, vector_of
from tests.factories_queue import MODEL
from tests.factories_worker import run_worker
from tests.waiting import until

KEYS = {"gateway": {"api_keys": ("sk-one", "sk-two")}}


async def embed(gateway, *texts, key="sk-one"):
    body = {"model": MODEL, "input": list(texts)}
    response = await gateway.client.post(
        EMBEDDINGS, json=body, headers={"authorization": f"Bearer {key}"}
    )
    assert response.status_code == 200, response.text
    assert read_vectors(response.json()) == [vector_of(text) for text in texts]
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
async def fleet(ends, redis_server):
    async with (
        run_fleet(ends, redis_server, **KEYS) as (gateway, [worker]),
        AsyncExitStack() as stack,
    ):
        settings = make_settings(redis_server, ends.prefix, **KEYS)
        other = await stack.enter_async_context(run_gateway_on_socket(settings))
        yield gateway, other, worker


async def hold(gateway, worker):
    """A request whose step does not end until the gate is open; others are prepared meanwhile."""
    worker.engine.gate.clear()
    held = asyncio.create_task(embed(gateway, "held up"))
    await until(lambda: worker.engine.added)
    return held


async def test_two_gateways_at_once_have_it_computed_once_and_another_tenant_anew(fleet):
    gateway, other, worker = fleet
    held = await hold(gateway, worker)
    asking = [
        asyncio.create_task(embed(each, "the same", "the same", key=key))
        for each in (gateway, other)
        for key in ("sk-one", "sk-two")
    ]
    await until(lambda: worker.engine.num_prepared == 5)
    worker.engine.gate.set()
    cached = await asyncio.gather(held, *asking)
    assert sorted(cached) == [0, 2, 2, 4, 4]
    stats = worker.engine.stats()
    assert (stats.num_result_queries, stats.num_result_hits) == (9, 6)
    assert await embed(other, "the same") == 2
    assert await embed(other, "the same", key="sk-two") == 2
    assert await embed(other, "not yet") == 0


async def test_who_follows_a_client_that_leaves_is_answered(fleet, ends):
    gateway, other, worker = fleet
    held = await hold(gateway, worker)
    leaving = asyncio.create_task(embed(gateway, "a", "b"))
    await until(lambda: worker.engine.num_prepared == 2)
    following = asyncio.create_task(embed(other, "b", "c"))
    await until(lambda: worker.engine.num_prepared == 3)
    leaving.cancel()
    async with asyncio.timeout(20):
        while await ends.num_open() > 2:
            await asyncio.sleep(0.005)
    worker.engine.gate.set()
    await asyncio.gather(held, following)


async def test_a_killed_worker_loses_its_results_and_no_answer(ends, redis_server):
    async with run_fleet(ends, redis_server) as (gateway, [first]), AsyncExitStack() as stack:
        settings = make_settings(redis_server, ends.prefix)
        other = await stack.enter_async_context(run_gateway_on_socket(settings))
        await embed(gateway, "known")
        first.engine.gate.clear()
        asking = [
            asyncio.create_task(embed(each, "known", "unknown", "unknown"))
            for each in (gateway, other)
        ]
        await until(lambda: first.engine.num_prepared == 3)
        await first.vanish()
        async with run_worker(ends, "second", load=load, lease_s=0.6) as second:
            await asyncio.gather(*asking)
            assert second.engine.stats().num_result_hits == 4
            assert len(second.engine.added) == 2
