"""CPU time of Redis for open requests without events: `vlm bench gateway --growth WORKERS`.

Workers with `NUM_SEATS` running requests each repeat the calls of a heartbeat, which run the real Lua scripts. The CPU
time is Redis's own, so that the figures do not depend on other processes of the machine.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from statistics import median

from redis.asyncio import Redis
from rich.table import Table

from benchmarks.tables import new_table
from shared.protocol import Envelope, ModelCard, Priority
from shared.queue.api import Submission
from shared.queue.gateway import RedisGatewayQueue, RedisMailbox
from shared.queue.registry import Registry, WorkerRecord
from shared.queue.worker import RedisWorkerQueue
from shared.redis.client import create_redis
from shared.redis.embedded import EmbeddedRedis
from shared.settings.tree import RedisSettings, WorkerSettings

MODEL, PREFIX = "mock", "growth"
NUM_SEATS = 100  #: running requests of a worker
NUM_GATEWAYS = 2
GATEWAYS_EVERY_S = 1.0  #: interval between two readings of the registry
HEARTBEATS_PER_ROUND = 6  #: a lease is renewed at every third heartbeat
PAYLOAD = bytes(2000)

#: By kind of work: seconds between two runs, and the function that runs the work of all workers.
Kinds = Mapping[str, tuple[float, Callable[[], Awaitable[object]]]]


async def measure_growth(num_workers: int, rounds: int) -> Table:
    """The cost of each kind of work of the whole fleet, per second."""
    with (
        tempfile.TemporaryDirectory(prefix="vlm-bench-") as folder,
        EmbeddedRedis(Path(folder)) as server,
    ):
        async with create_redis(RedisSettings(url=server.url)) as redis:
            costs = await measure_costs(redis, num_workers, rounds, WorkerSettings())
    table = new_table(
        f"{num_workers} workers, {num_workers * NUM_SEATS} running requests",
        "at each heartbeat", "CPU of Redis in ms per second",
    )  # fmt: skip
    for name, each in costs.items():
        table.add_row(name, f"{median(each):.2f}")
    total_ms = sum(map(median, costs.values()))
    table.add_row("all", f"{total_ms:.1f} ({total_ms / 10:.1f} % of a core)")
    return table


async def measure_costs(
    redis: Redis, num_workers: int, rounds: int, settings: WorkerSettings
) -> dict[str, list[float]]:
    """CPU time of Redis for each kind of work and round, in ms per second."""
    heartbeat_s = settings.heartbeat_s
    registry = Registry(redis, PREFIX)
    mailbox = RedisMailbox(redis, PREFIX, "gateway")
    await mailbox.open([MODEL])
    workers = [
        RedisWorkerQueue(
            redis, redis, keys_prefix=PREFIX, model=MODEL, worker_id=str(number), lease_s=settings.lease_s,
            max_attempts=settings.max_attempts, batch_age_s=settings.batch_age_s,
        )
        for number in range(num_workers)
    ]  # fmt: skip
    await workers[0].create_group()
    queue = RedisGatewayQueue(redis, PREFIX)
    await _submit(queue, num_workers * NUM_SEATS)
    claims = [await worker.read(NUM_SEATS, 1.0) for worker in workers]
    assert all(len(each) == NUM_SEATS for each in claims)
    pairs = list(zip(workers, claims, strict=True))
    card = ModelCard(MODEL, created_at=0, max_model_len=4096, vocab_size=32_000)
    records = [WorkerRecord(str(number), card, "mock") for number in range(num_workers)]

    async def renew_all() -> None:
        for worker, own in pairs:
            await asyncio.gather(worker.renew(own), worker.cancel_deserted(own))

    async def reconcile_all() -> None:
        for worker in workers:
            await asyncio.gather(worker.reconcile(), worker.take_scan(heartbeat_s))

    async def announce_all() -> None:
        for record in records:
            await registry.announce(record, 60.0)

    kinds: Kinds = {
        "renew leases, find lost gateways": (heartbeat_s, renew_all),
        "find lost replies, ask for the scan": (heartbeat_s, reconcile_all),
        "scan for expired leases": (heartbeat_s, lambda: workers[0].reclaim(1)),
        "announce workers": (heartbeat_s, announce_all),
        "gateways read the registry": (
            GATEWAYS_EVERY_S / NUM_GATEWAYS, lambda: asyncio.gather(registry.workers(), registry.models()),
        ),
    }  # fmt: skip
    await _measure_round(redis, kinds, heartbeat_s)  # loads the scripts
    measured = [await _measure_round(redis, kinds, heartbeat_s) for _ in range(rounds)]
    for each in (*workers, queue, mailbox, registry):
        await each.close()
    return {name: [costs[name] for costs in measured] for name in kinds}


async def _measure_round(redis: Redis, kinds: Kinds, heartbeat_s: float) -> dict[str, float]:
    """The cost of each kind per second, over some heartbeats at their real pace, so that leases age."""
    costs = dict.fromkeys(kinds, 0.0)
    clock = asyncio.get_running_loop().time
    for _ in range(HEARTBEATS_PER_ROUND):
        began_at = clock()
        for name, (every_s, work) in kinds.items():
            before_s = await _cpu_s(redis)
            await work()
            costs[name] += 1000 * (await _cpu_s(redis) - before_s) / every_s / HEARTBEATS_PER_ROUND
        await asyncio.sleep(began_at + heartbeat_s - clock())
    return costs


async def _submit(queue: RedisGatewayQueue, count: int) -> None:
    envelopes = [
        Envelope(f"request-{number}", MODEL, "gateway", "tenant", Priority.INTERACTIVE, PAYLOAD)
        for number in range(count)
    ]
    submissions = (Submission([each], timeout_s=3600.0, max_waiting=count) for each in envelopes)
    await asyncio.gather(*map(queue.submit, submissions))


async def _cpu_s(redis: Redis) -> float:
    """CPU time that Redis has used; its clock has microseconds."""
    info = await redis.info("cpu")
    return info["used_cpu_user"] + info["used_cpu_sys"]
