"""Faults of real processes, long form (`make faults`): the faults of docs/reliability.md that take their time.

Faults come at named points of a request or of a stream; each test ends with all promises checked (`playing`).
"""

import asyncio
import signal
from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from tests.faults.clients import Clients
from tests.faults.fleet import KEYS, playing, streaming, tokens_seen
from tests.faults.history import FAILED, FINISHED, REFUSED
from tests.faults.processes import MODEL
from tests.faults.rest import Resources, growth
from tests.long import long

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    long("faults"),
]


@pytest.mark.parametrize(
    ("fault", "code"), [("kill-prefill", -signal.SIGKILL), ("break", 71), ("wedge", 70)]
)
async def test_a_worker_lost_at_any_point_is_not_noticed_by_any_client(fleet, fault, code):
    await fleet.retire_workers()
    victim = await fleet.worker(VLM_WORKER__WATCHDOG_S="2")
    texts = [fleet.name(f"!{fault}"), *(fleet.name() for _ in range(3))]
    async with playing(fleet, texts) as clients:
        assert await victim.ended() == code
        await fleet.worker()
    assert clients.history.outcomes() == {FINISHED: 4}


async def test_a_request_that_kills_every_worker_takes_no_other_with_it(fleet):
    """P5: three workers at most, a clear error, a dead letter, and its batch-mates finish."""
    await fleet.retire_workers()
    victim = await fleet.worker()
    poison = fleet.name("!kill-always")
    mates = [fleet.name() for _ in range(3)]
    num_deaths = 0
    async with playing(fleet, [poison, *mates]) as clients:
        while poison not in clients.errors:
            ended = asyncio.ensure_future(victim.ended())
            while not ended.done() and poison not in clients.errors:
                await asyncio.sleep(0.05)
            if ended.done():
                num_deaths += 1
                victim = await fleet.worker()
            else:
                ended.cancel()
    assert num_deaths == 3
    assert clients.history.outcomes() == {FINISHED: 3, FAILED: 1}
    assert clients.errors[poison]["code"] == "request_kills_workers"
    [letter] = await fleet.dead_letters()
    assert letter[b"reason"] == b"kills_workers"


async def test_requests_wait_while_all_workers_are_gone(fleet):
    await (await fleet.some_worker()).end()
    await fleet.retire_workers()
    async with playing(fleet, [fleet.name() for _ in range(4)]) as clients:
        await fleet.until(lambda: _queue_holds(fleet, 4))
        await fleet.worker()
    assert clients.history.outcomes() == {FINISHED: 4}


async def test_all_workers_killed_in_mid_stream_and_away_for_twenty_seconds(fleet):
    await fleet.retire_workers()
    workers = [await fleet.worker() for _ in range(2)]
    async with streaming(fleet, 4, num_tokens=100) as clients:
        for worker in workers:
            await worker.end()
        await asyncio.sleep(20.0)  # the fault itself
        await fleet.worker()
    assert clients.history.outcomes() == {FINISHED: 4}


async def _queue_holds(fleet, count: int) -> bool:
    return await fleet.redis.xlen(KEYS.queue(MODEL)) >= count


async def test_a_worker_that_comes_back_as_a_zombie_adds_nothing(fleet):
    await fleet.retire_workers()
    zombie = await fleet.worker()
    texts = [fleet.name() for _ in range(3)]
    async with playing(fleet, texts, num_tokens=100) as clients:
        await tokens_seen(fleet, clients, texts, 5)
        zombie.signal(signal.SIGSTOP)
        await fleet.worker()
        await tokens_seen(fleet, clients, texts, 60)
        zombie.signal(signal.SIGCONT)
    assert clients.history.outcomes() == {FINISHED: 3}
    await zombie.says("no longer ours")


async def test_two_workers_of_one_name_do_no_harm(fleet):
    await fleet.retire_workers()
    await fleet.processes.worker("worker-reference implementation")
    await fleet.processes.worker("worker-reference implementation")
    async with playing(fleet, [fleet.name() for _ in range(8)]) as clients:
        pass
    assert clients.history.outcomes() == {FINISHED: 8}


async def test_an_entry_delivered_twice_runs_once(fleet):
    await fleet.retire_workers()
    async with playing(fleet, [fleet.name() for _ in range(3)]) as clients:
        await fleet.until(lambda: _queue_holds(fleet, 3))
        for _, fields in await fleet.redis.xrange(KEYS.queue(MODEL)):
            await fleet.redis.xadd(KEYS.queue(MODEL), fields)
        await fleet.worker()
    assert clients.history.outcomes() == {FINISHED: 3}


@pytest.mark.parametrize("fault", ["full", "read-only", "disk"])
async def test_a_redis_that_takes_no_writes_refuses_new_requests_and_keeps_old_ones(
    fleet, fault, tmp_path
):
    await fleet.some_worker()
    break_, mend = {
        "full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        "read-only": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        "disk": (("BGSAVE",), ("CONFIG", "SET", "save", "")),
    }[fault]
    if fault == "disk":
        await _make_snapshots_fail(fleet, tmp_path / "gone")
    async with streaming(fleet, 2, num_tokens=150) as clients:
        await fleet.redis.execute_command(*break_)
        await fleet.until(lambda: _refuses_writes(fleet))
        late = Clients()
        late_text = fleet.name()
        await late.ask(fleet.url, late_text)
        await fleet.redis.execute_command(*mend)
    assert late.history.outcomes() == {REFUSED: 1}
    assert clients.history.outcomes() == {FINISHED: 2}


async def _refuses_writes(fleet) -> bool:
    try:
        await fleet.redis.set("probe", "", px=1000)
    except (ResponseError, RedisConnectionError):
        return True
    return False


async def _make_snapshots_fail(fleet, folder: Path) -> None:
    """The next BGSAVE finds no directory; Redis then refuses writes (MISCONF) as with a full disk."""
    folder.mkdir()
    await fleet.redis.config_set("dir", str(folder))
    await fleet.redis.config_set("save", "3600 1000000")
    folder.rmdir()


async def test_nothing_grows_over_many_requests(fleet):
    worker = await fleet.some_worker()
    pids = {"gateway": fleet.gateway.pid, "worker": worker.pid}
    assert fleet.processes.server.pid is not None

    async def ask_many() -> None:
        async with playing(fleet, [fleet.name() for _ in range(10)]) as clients:
            pass
        assert clients.history.outcomes() == {FINISHED: 10}

    await ask_many()
    before = {name: Resources.of(pid) for name, pid in pids.items()}
    for _ in range(5):
        await ask_many()
    for name, pid in pids.items():
        assert growth(before[name], Resources.of(pid)) == [], name
