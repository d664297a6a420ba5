"""The fleet under test, its clients, and the promises that are checked at the end of each test."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from redis.exceptions import RedisError

from shared.process import cancel
from shared.queue.keys import RedisKeys
from shared.redis.client import create_redis
from shared.settings.tree import RedisSettings
from tests.faults.clients import Clients
from tests.faults.history import REFUSED, conservation
from tests.faults.processes import (
    FAULTY,
    MODEL,
    PREFIX,
    WITHIN_S,
    Process,
    Processes,
    run_processes,
)
from tests.faults.proxy import FaultProxy, run_proxy
from tests.faults.rest import redis_leftovers
from tests.waiting import until

KEYS = RedisKeys(PREFIX)
#: Outcomes of requests that the gateway did not accept.
NOT_ACCEPTED = ("rejected", "service_unavailable")


class Fleet:
    """Processes, the gateway's URL, and unique prompts."""

    def __init__(
        self, processes: Processes, gateway: Process, url: str, proxy: FaultProxy | None = None
    ) -> None:
        self.processes = processes
        self.redis = processes.redis
        self.gateway = gateway
        self.url = url
        self.proxy = proxy
        self._numbers = count(1)
        self._worker_numbers = count(1)

    def name(self, fault: str = "") -> str:
        """Returns a unique prompt that requests a fault."""
        return f"{fault} question {next(self._numbers)}".strip()

    async def worker(self, command: tuple[str, ...] = FAULTY, **variables: str) -> Process:
        name = f"worker-{next(self._worker_numbers)}"
        return await self.processes.worker(name, command, **variables)

    @property
    def workers(self) -> list[Process]:
        return [p for p in self.processes.all if p.name.startswith("worker") and p.lives]

    async def some_worker(self) -> Process:
        """Returns a running worker; starts one if there is none."""
        return self.workers[0] if self.workers else await self.worker()

    async def only_worker(self) -> Process:
        """Ends all workers except one; returns it."""
        for process in self.workers[1:]:
            await process.end()
        return await self.some_worker()

    async def retire_workers(self) -> None:
        """Ends all workers."""
        for process in self.workers:
            await process.end()

    async def until(self, holds: Callable[[], Awaitable[bool]], within_s: float = WITHIN_S) -> None:
        """Waits until a condition holds; it does not while Redis is down."""

        async def hold() -> bool:
            with suppress(RedisError):
                return await holds()
            return False

        await until(hold, within_s)

    async def at_rest(self) -> None:
        """Waits until every request has ended in Redis, too. Raises: AssertionError, naming what is left."""
        left: list[str] = []

        async def is_empty() -> bool:
            left[:] = await redis_leftovers(self.redis, PREFIX)
            return not left

        try:
            await self.until(is_empty, 30.0)
        except TimeoutError:
            raise AssertionError(left) from None

    async def num_accepted(self) -> int:
        """Returns the number of accepted requests that have ended, by the gateway's metrics."""
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=WITHIN_S) as client:
            text = (await client.get(f"{self.url}/metrics")).text
        return sum(
            int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "vlm_requests_total" and sample.labels["outcome"] not in NOT_ACCEPTED
        )

    async def has_counted(self, accepted: int) -> int:
        """Returns that number after it reached `accepted`: a request is counted just after its last byte was sent."""

        async def is_counted() -> bool:
            return await self.num_accepted() >= accepted

        with suppress(TimeoutError):  # the caller compares the numbers
            await self.until(is_counted, 10.0)
        return await self.num_accepted()

    async def dead_letters(self) -> list[dict[bytes, bytes]]:
        """Returns the requests that were given up."""
        return [fields for _, fields in await self.redis.xrange(KEYS.dead(MODEL))]


@asynccontextmanager
async def run_fleet(folder: Path, **variables: str) -> AsyncIterator[Fleet]:
    """Runs Redis behind a proxy, and a gateway with these settings."""
    async with run_proxy(folder / "redis.sock") as proxy, run_processes(folder, proxy.url) as all_:
        gateway, url = await all_.gateway(**variables)
        yield Fleet(all_, gateway, url, proxy)


@asynccontextmanager
async def run_fleet_at(url: str, reader_url: str = "", **variables: str) -> AsyncIterator[Fleet]:
    """Runs a gateway with these settings on an existing Redis; tests read from `reader_url`."""
    redis = create_redis(RedisSettings(url=reader_url or url))
    processes = Processes(None, redis, url)
    try:
        gateway, gateway_url = await processes.gateway(**variables)
        yield Fleet(processes, gateway, gateway_url)
    finally:
        await processes.close()
        await redis.aclose()


@asynccontextmanager
async def playing(
    fleet: Fleet, texts: Iterable[str], clients: Clients | None = None, **options
) -> AsyncIterator[Clients]:
    """Clients send all texts concurrently while the block plays a fault; afterwards every promise is checked."""
    clients = clients or Clients()
    num_before = await fleet.num_accepted()
    tasks = [asyncio.create_task(clients.ask(fleet.url, text, **options)) for text in texts]
    try:
        yield clients
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*tasks)
    finally:
        await cancel(*tasks)
    outcomes = clients.history.outcomes()
    print(f"{dict(outcomes)}, longest pause {clients.history.longest_pause_s():.1f} s")  # with -s
    accepted = len(tasks) - outcomes[REFUSED]
    num_counted = await fleet.has_counted(num_before + accepted) - num_before
    assert clients.history.violations() == []
    assert conservation(accepted, outcomes) == []
    assert conservation(num_counted, outcomes) == []
    await fleet.at_rest()


async def tokens_seen(fleet: Fleet, clients: Clients, texts: Sequence[str], count: int) -> None:
    """Waits until the clients of all these requests have received `count` tokens each."""

    async def have_seen() -> bool:
        return all(len(clients.history.tokens(text)) >= count for text in texts)

    await fleet.until(have_seen)


@asynccontextmanager
async def streaming(fleet: Fleet, num_requests: int, num_tokens: int) -> AsyncIterator[Clients]:
    """As `playing`; the block starts after every stream has begun."""
    texts = [fleet.name() for _ in range(num_requests)]
    async with playing(fleet, texts, num_tokens=num_tokens) as clients:
        await tokens_seen(fleet, clients, texts, 5)
        yield clients


async def used(fleet: Fleet) -> Counter[str]:
    """Returns the numbers of requests and output tokens, summed over all days."""
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        rows = (await client.get(f"{fleet.url}/v1/usage?by=model")).json()["data"]
    kinds = ("requests", "output_tokens")
    return Counter({kind: sum(row[kind] for row in rows) for kind in kinds})
