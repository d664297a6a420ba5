"""Mixed traffic for as long as one likes, a fault a minute, and at the end everything as it was: `SOAK_SECONDS=3600`.

Streams of random length, interactive and batch, of which some leave; each answer is checked token by token. The faults
are those that no client may notice. Rounds overlap, so that each fault meets some of them at every point.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter

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
NUM_LOOPS = 2  #: rounds at a time
ROUND_SIZE = 6
SEED = 1

pytestmark = [
    pytest.mark.timeout(2 * SOAK_S + 600),
    pytest.mark.skipif(not SOAK_S, reason="for as long as SOAK_SECONDS says"),
]


class Soak:
    """Traffic on a fleet until a time, and the faults in it."""

    def __init__(self, fleet: Fleet, dice: random.Random) -> None:
        self.fleet = fleet
        self.dice = dice
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.longest_pause_s = 0.0

    async def run(self, until: float) -> None:
        """Ask on; play a fault now and then."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_LOOPS):
                tasks.create_task(self._ask_on(until))
            tasks.create_task(self._play_on(until))

    async def _ask_on(self, until: float) -> None:
        while time.monotonic() < until:
            await self.ask_round()

    async def ask_round(self) -> None:
        """Some requests that begin together; then every law must hold for them."""
        clients = Clients()
        await asyncio.gather(*(self._ask(clients) for _ in range(ROUND_SIZE)))
        outcomes = clients.history.outcomes()
        assert clients.history.violations() == []
        assert conservation(ROUND_SIZE - outcomes[REFUSED], outcomes) == []
        assert outcomes[FAILED] == 0, clients.errors
        self.outcomes += outcomes
        self.longest_pause_s = max(self.longest_pause_s, clients.history.longest_pause_s())

    async def _ask(self, clients: Clients) -> None:
        dice = self.dice
        await clients.ask(
            self.fleet.url,
            self.fleet.name(),
            num_tokens=dice.choice((5, 20, 60)),
            leave_after=3 if dice.random() < 0.2 else None,
            priority="batch" if dice.random() < 0.3 else "interactive",
        )

    async def _play_on(self, until: float) -> None:
        faults = [self.kill_worker, self.stop_worker, self.kill_redis, self.freeze, self.cut]
        while (due_at := time.monotonic() + FAULT_EVERY_S) < until:
            await asyncio.sleep(FAULT_EVERY_S / 2)
            fault = faults[self.faults.total() % len(faults)]
            await fault()
            self.faults[fault.__name__] += 1
            await asyncio.sleep(max(0.0, due_at - time.monotonic()))

    async def kill_worker(self) -> None:
        """And start another."""
        await self.fleet.processes.all[-1].end()
        await self.fleet.worker()

    async def stop_worker(self) -> None:
        """Beyond its lease: it comes back as a zombie."""
        worker = self.fleet.processes.all[-1]
        worker.signal(signal.SIGSTOP)
        await asyncio.sleep(2 * LEASE_S)
        worker.signal(signal.SIGCONT)

    async def kill_redis(self) -> None:
        """It starts again from its file."""
        self.fleet.processes.kill_redis()
        await asyncio.to_thread(self.fleet.processes.server.start)

    async def freeze(self) -> None:
        """Redis is silent for longer than any time-out, with its connections open."""
        self.fleet.proxy.freeze()
        await asyncio.sleep(3.0)
        self.fleet.proxy.thaw()

    async def cut(self) -> None:
        """A reply is lost, and all connections break."""
        self.fleet.proxy.drop_next_reply(PUBLISH.sha.encode())
        await asyncio.sleep(1.0)
        self.fleet.proxy.reset()


async def test_soak(tmp_path):
    async with run_fleet(tmp_path) as fleet:
        steady = await fleet.worker()
        await fleet.worker()  # the one that faults happen to
        soak = Soak(fleet, random.Random(SEED))
        for _ in range(5):
            await soak.ask_round()
        pids = {"gateway": fleet.gateway.pid, "worker": steady.pid}
        before = {name: Resources.of(pid) for name, pid in pids.items()}

        await soak.run(time.monotonic() + SOAK_S)

        num_accepted = soak.outcomes.total() - soak.outcomes[REFUSED]
        assert conservation(await fleet.has_counted(num_accepted), soak.outcomes) == []
        await fleet.at_rest()
        await fleet.until(lambda: has_forgotten(fleet), 2 * AFTER_END_S)
        after = {name: Resources.of(pid) for name, pid in pids.items()}
        print(
            f"\n{SOAK_S:.0f} s, {dict(soak.outcomes)}, faults {dict(soak.faults)}, longest pause "
            f"{soak.longest_pause_s:.1f} s\nbefore {before}\nafter {after}"
        )
        for name in pids:
            assert growth(before[name], after[name]) == [], name
        assert soak.outcomes[REFUSED] <= soak.outcomes.total() / 10


async def has_forgotten(fleet: Fleet) -> bool:
    """Whether no key of any request is left."""
    keys = [key async for key in fleet.redis.scan_iter(f"{PREFIX}:*:request:*", count=1000)]
    keys += [key async for key in fleet.redis.scan_iter(f"{PREFIX}:*:log:*", count=1000)]
    return not keys
