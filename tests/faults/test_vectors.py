"""Faults where vectors are made and kept: a worker in its batch, the search process while it writes, Redis, overload.

The long form plays more of them, and longer. Each test ends with all promises checked, and with what stores hold.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from tests.factories_search import SearchProcess
from tests.faults.fleet import Fleet, playing, run_fleet
from tests.faults.history import FAILED, FINISHED
from tests.faults.processes import FAULTY_POOLING, Process
from tests.faults.vectors import StoreClients, VectorClients
from tests.long import long

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]
in_the_long_form = long("faults")

NUM_WRITERS = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[SearchProcess]:
    """A search process that is not started yet."""
    process = SearchProcess(tmp_path_factory.mktemp("search"))
    yield process
    process.close()


@pytest.fixture(scope="module")
def search(place) -> SearchProcess:
    place.start()
    return place


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(place, tmp_path_factory) -> AsyncIterator[Fleet]:
    async with run_fleet(
        tmp_path_factory.mktemp("faults"),
        VLM_SEARCH__URL=place.url,
        VLM_LIMITS__MAX_QUEUE_DEPTH="64",
    ) as fleet:
        yield fleet


async def start_worker(fleet: Fleet, **variables: str) -> Process:
    return await fleet.worker(wait=True, command=FAULTY_POOLING, **variables)


@asynccontextmanager
async def writing(fleet: Fleet, *, fault: str = "") -> AsyncIterator[StoreClients]:
    """Writers of one store while the block plays a fault; then it holds what it must."""
    stores = StoreClients(fleet.url)
    await stores.create()
    is_over = False
    writers = [
        asyncio.create_task(
            stores.write_until(f"writer {n}", lambda: is_over, fault if n == 0 else "")
        )
        for n in range(NUM_WRITERS)
    ]
    try:
        await acknowledged(fleet, stores, 5)
        yield stores
        await acknowledged(fleet, stores, 5)
    finally:
        is_over = True
        await asyncio.gather(*writers)
    await stores.check()
    await stores.close()
    await fleet.at_rest()
    print(f"{stores.num_acknowledged} writes acknowledged, {len(stores.refusals)} refused")


async def acknowledged(fleet: Fleet, stores: StoreClients, count: int) -> None:
    """Wait until so many writes more have been acknowledged."""
    wanted = stores.num_acknowledged + count

    async def are_there() -> bool:
        return stores.num_acknowledged >= wanted

    await fleet.until(are_there)


async def test_a_worker_killed_in_a_batch_loses_no_vector_and_doubles_none(fleet):
    """P2, P3, P4, P8: a request of several calls among them."""
    await fleet.retire_workers()
    victim = await start_worker(fleet)
    texts = [fleet.name("!kill-batch"), *(fleet.name() for _ in range(3))]
    clients = VectorClients()
    async with playing(fleet, texts, clients, num_inputs=300):
        assert await victim.ended() == -signal.SIGKILL
        assert clients.history.outcomes().keys() <= {FINISHED}  # before the batch that killed it
        await start_worker(fleet)
    assert clients.history.outcomes() == {FINISHED: 4}


@in_the_long_form
async def test_a_search_process_killed_while_it_writes_keeps_what_it_acknowledged(fleet, search):
    """Writers get 503 meanwhile, try again, and nothing is there twice or in part."""
    await fleet.some_worker(FAULTY_POOLING)
    async with writing(fleet) as stores:
        for _ in range(10):
            search.kill()
            await asyncio.to_thread(search.start)
            await acknowledged(fleet, stores, 5)


@in_the_long_form
@pytest.mark.parametrize(("fault", "code"), [("break", 71), ("kill-finish", -signal.SIGKILL)])
async def test_a_worker_lost_in_other_ways(fleet, fault, code):
    await fleet.retire_workers()
    victim = await start_worker(fleet)
    clients = VectorClients()
    texts = [fleet.name(f"!{fault}"), *(fleet.name() for _ in range(3))]
    async with playing(fleet, texts, clients, num_inputs=20):
        assert await victim.ended() == code
        await start_worker(fleet)
    assert clients.history.outcomes() == {FINISHED: 4}


@in_the_long_form
async def test_inputs_that_kill_every_worker_take_no_other_request_with_them(fleet):
    """P5"""
    await fleet.retire_workers()
    victim = await start_worker(fleet)
    clients, poison = VectorClients(), fleet.name("!kill-always")
    async with playing(fleet, [poison, *(fleet.name() for _ in range(3))], clients):
        for _ in range(3):
            assert await victim.ended() == -signal.SIGKILL
            victim = await start_worker(fleet)
    assert clients.history.outcomes() == {FINISHED: 3, FAILED: 1}
    assert clients.errors[poison]["code"] == "request_kills_workers"


@in_the_long_form
async def test_a_redis_that_is_killed_while_stores_are_written_loses_nothing(fleet, search):
    await fleet.retire_workers()
    await start_worker(fleet)
    async with writing(fleet) as stores:
        for _ in range(3):
            await asyncio.to_thread(fleet.processes.kill_redis)
            await asyncio.to_thread(fleet.processes.server.start)
            await acknowledged(fleet, stores, 5)


@in_the_long_form
async def test_a_worker_killed_while_stores_are_written_costs_no_item(fleet, search):
    await fleet.retire_workers()
    victim = await start_worker(fleet)
    async with writing(fleet) as stores:
        for _ in range(3):
            await victim.end()
            victim = await start_worker(fleet)
            await acknowledged(fleet, stores, 5)


@in_the_long_form
async def test_a_search_process_that_stands_still_is_waited_for(fleet, search):
    await fleet.retire_workers()
    await start_worker(fleet)
    async with writing(fleet) as stores:
        search.signal(signal.SIGSTOP)
        await asyncio.sleep(5.0)  # the fault itself
        search.signal(signal.SIGCONT)
    assert stores.refusals == []


@in_the_long_form
async def test_overload_refuses_writes_and_loses_none_that_it_took(fleet, search):
    """More writers than the queue has room for, and a slow worker."""
    await fleet.retire_workers()
    await start_worker(fleet, VLM_ENGINE__MOCK__STEP_S="0.2", VLM_ENGINE__MAX_CALLS="2")
    stores = StoreClients(fleet.url)
    await stores.create()
    is_over = False
    writers = [
        asyncio.create_task(stores.write_until(f"writer {n}", lambda: is_over)) for n in range(100)
    ]
    await acknowledged(fleet, stores, 100)
    is_over = True
    await asyncio.gather(*writers)
    assert 503 in stores.refusals
    await stores.check()
    await stores.close()
    await fleet.at_rest()
