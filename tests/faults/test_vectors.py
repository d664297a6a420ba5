"""Faults of embeddings and vector stores: a worker in its batch, the search process during a write, Redis, overload.

The long form plays more and longer faults. Each test ends by checking all promises and the contents of stores.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from tests.factories_search import SearchProcess
from tests.faults.fleet import Fleet, playing, run_fleet
from tests.faults.history import FINISHED
from tests.faults.processes import FAULTY_POOLING
from tests.faults.vectors import StoreClients, VectorClients
from tests.long import long

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

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
    async with run_fleet(tmp_path_factory.mktemp("faults"), VLM_SEARCH__URL=place.url) as fleet:
        yield fleet


@asynccontextmanager
async def writing(fleet: Fleet) -> AsyncIterator[StoreClients]:
    """Clients write to one store while the block plays a fault; then its contents are checked."""
    stores = StoreClients(fleet.url)
    await stores.create()
    is_over = False
    writers = [
        asyncio.create_task(stores.write_until(f"writer {n}", lambda: is_over))
        for n in range(NUM_WRITERS)
    ]
    try:
        await acknowledged(fleet, stores, 5)
        yield stores
    finally:
        is_over = True
        await asyncio.gather(*writers)
    await stores.check()
    await stores.close()
    await fleet.at_rest()
    print(f"{stores.num_acknowledged} writes acknowledged, {len(stores.refusals)} refused")


async def acknowledged(fleet: Fleet, stores: StoreClients, count: int) -> None:
    """Waits until `count` further writes have been acknowledged."""
    wanted = stores.num_acknowledged + count

    async def are_there() -> bool:
        return stores.num_acknowledged >= wanted

    await fleet.until(are_there)


async def test_a_worker_killed_in_a_batch_loses_and_repeats_no_vector(fleet):
    """P2, P3, P4, P8, including a request that is split into several calls."""
    victim = await fleet.worker(command=FAULTY_POOLING)
    texts = [fleet.name("!kill-batch"), *(fleet.name() for _ in range(3))]
    clients = VectorClients()
    async with playing(fleet, texts, clients, num_inputs=300):
        assert await victim.ended() == -signal.SIGKILL
        assert clients.history.outcomes().keys() <= {FINISHED}  # before the batch that killed it
        await fleet.worker(command=FAULTY_POOLING)
    assert clients.history.outcomes() == {FINISHED: 4}


@long("faults")
@pytest.mark.parametrize("fault", ["search", "silent search", "worker", "redis"])
async def test_acknowledged_items_survive_any_kill(fleet, search, fault):
    """Meanwhile writers get 503 and retry; nothing is stored twice or in part."""
    await fleet.retire_workers()
    victim = await fleet.worker(command=FAULTY_POOLING)
    async with writing(fleet) as stores:
        for _ in range(3):
            if fault == "search":
                search.kill()
                await asyncio.to_thread(search.start)
            elif fault == "silent search":
                search.signal(signal.SIGSTOP)
                await asyncio.sleep(5.0)  # duration of the fault
                search.signal(signal.SIGCONT)
            elif fault == "worker":
                await victim.end()
                victim = await fleet.worker(command=FAULTY_POOLING)
            else:
                await asyncio.to_thread(fleet.processes.kill_redis)
                await asyncio.to_thread(fleet.processes.server.start)
            await acknowledged(fleet, stores, 5)
    assert fault != "silent search" or stores.refusals == []
