"""Mixed traffic for any duration with a fault per minute; at the end, no resource has grown: `SOAK_SECONDS=3600`.

Streams have random lengths, are interactive or batch, and some clients disconnect. Each answer is checked token by
token. The faults are those that no client can notice. Rounds overlap, so that each fault meets some at every point.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from shared.queue.keys import AFTER_END_S
from shared.queue.scripts import PUBLISH
from tests.faults.clients import Clients
from tests.faults.fleet import Fleet, run_fleet
from tests.faults.history import FAILED, REFUSED, conservation
from tests.faults.processes import LEASE_S, PREFIX
from tests.faults.rest import Resources, growth

SOAK_S = float(os.environ.get("SOAK_SECONDS", "0"))
FAULT_EVERY_S = 60.0
NUM_LOOPS = 2  #: concurrent rounds
ROUND_SIZE = 6
SEED = 1

pytestmark = [
    pytest.mark.timeout(2 * SOAK_S + 600),
    pytest.mark.skipif(not SOAK_S, reason="for as long as SOAK_SECONDS says"),
]


def faults_of(fleet: Fleet) -> list[Callable[[], Awaitable[None]]]:
    """Returns the faults that no client can notice; they affect the last worker."""

    async def kill_worker() -> None:
        await fleet.processes.all[-1].end()
        await fleet.worker()

    async def stop_worker() -> None:
        """Pauses a worker beyond its lease; it returns as a zombie."""
        worker = fleet.processes.all[-1]
        worker.signal(signal.SIGSTOP)
        await asyncio.sleep(2 * LEASE_S)
        worker.signal(signal.SIGCONT)

    async def kill_redis() -> None:
        fleet.processes.kill_redis()
        await asyncio.to_thread(fleet.processes.server.start)

    async def freeze() -> None:
        """Redis is silent for longer than any timeout, with its connections open."""
        fleet.proxy.freeze()
        await asyncio.sleep(3.0)
        fleet.proxy.thaw()

    async def cut() -> None:
        """A reply is lost, and all connections are reset."""
        fleet.proxy.drop_next_reply(PUBLISH.sha.encode())
        await asyncio.sleep(1.0)
        fleet.proxy.reset()

    return [kill_worker, stop_worker, kill_redis, freeze, cut]


async def ask_round(fleet: Fleet, dice: random.Random) -> Counter[str]:
    """Sends some requests concurrently and checks all promises; counts them by their end."""
    clients = Clients()
    await asyncio.gather(
        *(
            clients.ask(
                fleet.url,
                fleet.name(),
                num_tokens=dice.choice((5, 20, 60)),
                leave_after=3 if dice.random() < 0.2 else None,
                priority="batch" if dice.random() < 0.3 else "interactive",
            )
            for _ in range(ROUND_SIZE)
        )
    )
    outcomes = clients.history.outcomes()
    assert clients.history.violations() == []
    assert conservation(ROUND_SIZE - outcomes[REFUSED], outcomes) == []
    assert outcomes[FAILED] == 0, clients.errors
    return outcomes


async def test_soak(tmp_path):
    outcomes, dice, num_faults = Counter[str](), random.Random(SEED), 0
    async with run_fleet(tmp_path) as fleet:
        steady = await fleet.worker()
        await fleet.worker()
        for _ in range(5):
            outcomes.update(await ask_round(fleet, dice))
        pids = {"gateway": fleet.gateway.pid, "worker": steady.pid}
        before = {name: Resources.of(pid) for name, pid in pids.items()}
        until = time.monotonic() + SOAK_S

        async def ask_on() -> None:
            while time.monotonic() < until:
                outcomes.update(await ask_round(fleet, dice))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_LOOPS):
                tasks.create_task(ask_on())
            while (due_at := time.monotonic() + FAULT_EVERY_S) < until:
                await asyncio.sleep(FAULT_EVERY_S / 2)
                faults = faults_of(fleet)
                await faults[num_faults % len(faults)]()
                num_faults += 1
                await asyncio.sleep(max(0.0, due_at - time.monotonic()))

        num_accepted = outcomes.total() - outcomes[REFUSED]
        assert conservation(await fleet.has_counted(num_accepted), outcomes) == []
        await fleet.at_rest()
        await fleet.until(lambda: has_forgotten(fleet), 2 * AFTER_END_S)
        after = {name: Resources.of(pid) for name, pid in pids.items()}
        print(f"\n{dict(outcomes)}, {num_faults} faults\nbefore {before}\nafter {after}")
        for name in pids:
            assert growth(before[name], after[name]) == [], name
        assert outcomes[REFUSED] <= outcomes.total() / 10


async def has_forgotten(fleet: Fleet) -> bool:
    """Returns whether no key of any request is left."""
    keys = [key async for key in fleet.redis.scan_iter(f"{PREFIX}:*:request:*", count=1000)]
    keys += [key async for key in fleet.redis.scan_iter(f"{PREFIX}:*:log:*", count=1000)]
    return not keys
