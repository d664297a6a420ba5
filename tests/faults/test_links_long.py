"""Faults of connections to Redis, long form (`make faults`): frozen, half open, cut on one side, slow, replies lost.

Each test ends with all promises checked (`playing`).
"""

import asyncio
import time

import pytest

from shared.queue.scripts import CLAIM, PUBLISH, SUBMIT
from tests.faults.clients import Clients
from tests.faults.fleet import playing, streaming, tokens_seen
from tests.faults.history import FINISHED, REFUSED
from tests.faults.proxy import run_proxy
from tests.long import long

#: A request that comes while Redis is silent: three tries of 2 s, and a slow machine.
REFUSED_WITHIN_S = 15.0

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    long("faults"),
]


@pytest.mark.parametrize("frozen_s", [3.0, 60.0])
async def test_a_redis_that_is_frozen_loses_nothing(fleet, frozen_s):
    """Who asks meanwhile is refused soon; streams pause and go on."""
    await fleet.some_worker()
    async with streaming(fleet, 3, num_tokens=150) as clients:
        fleet.proxy.freeze()
        thawed_at = time.monotonic() + frozen_s
        if frozen_s > 10:
            await _is_refused_soon(fleet)
        await asyncio.sleep(thawed_at - time.monotonic())  # the fault itself
        fleet.proxy.thaw()
    assert clients.history.outcomes() == {FINISHED: 3}


async def _is_refused_soon(fleet) -> None:
    late, text, began_at = Clients(), fleet.name(), time.monotonic()
    await late.ask(fleet.url, text)
    assert late.history.outcome(text) == REFUSED, late.errors
    print(f"refused after {time.monotonic() - began_at:.1f} s")
    assert time.monotonic() - began_at < REFUSED_WITHIN_S


async def test_a_gateway_cut_off_from_redis_refuses_and_its_streams_go_on(fleet):
    """Only the gateway: the worker speaks with Redis, and works on."""
    await fleet.retire_workers()
    await fleet.worker(VLM_REDIS_URL=fleet.processes.server.url)
    async with streaming(fleet, 3, num_tokens=150) as clients:
        fleet.proxy.freeze()
        thawed_at = time.monotonic() + 10.0
        await _is_refused_soon(fleet)
        await asyncio.sleep(thawed_at - time.monotonic())  # the fault itself
        fleet.proxy.thaw()
    assert clients.history.outcomes() == {FINISHED: 3}


async def test_a_worker_cut_off_from_redis_loses_its_requests_to_another(fleet):
    """Only that worker: at the end of its lease another goes on, and what it says when it is back is refused."""
    await fleet.retire_workers()
    async with run_proxy(fleet.processes.server.socket_path) as link:
        cut_off = await fleet.worker(VLM_REDIS_URL=link.url)
        texts = [fleet.name() for _ in range(3)]
        async with playing(fleet, texts, num_tokens=100) as clients:
            await tokens_seen(fleet, clients, texts, 5)
            link.freeze()
            await fleet.worker()
            await tokens_seen(fleet, clients, texts, 60)
            link.thaw()
        assert clients.history.outcomes() == {FINISHED: 3}
        await cut_off.says("no longer ours")
        await cut_off.end()


async def test_half_open_connections_are_given_up_in_time(fleet):
    """Redis believes that they live, and goes on to deliver to them; no end of them ever comes."""
    await fleet.some_worker()
    async with streaming(fleet, 3, num_tokens=150) as clients:
        fleet.proxy.half_open()
    assert clients.history.outcomes() == {FINISHED: 3}
    assert clients.history.longest_pause_s() < 15.0


COMMANDS = {
    "submit": SUBMIT.sha, "claim": CLAIM.sha, "publish": PUBLISH.sha, "finish": '"finished"',
    "renew": "JUSTID", "read": "XREADGROUP", "mailbox": "XREAD\r\n", "pending": "XPENDING",
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_lost_reply_of_any_command_changes_nothing(fleet, command):
    await fleet.some_worker()
    num_lost = fleet.proxy.num_lost
    async with playing(fleet, [fleet.name() for _ in range(3)], num_tokens=100) as clients:
        fleet.proxy.drop_next_reply(COMMANDS[command].encode())

        async def is_lost() -> bool:
            return fleet.proxy.num_lost == num_lost + 1

        await fleet.until(is_lost)
    assert clients.history.outcomes() == {FINISHED: 3}


async def test_slow_and_broken_connections_lose_nothing(fleet):
    await fleet.some_worker()
    texts = [fleet.name() for _ in range(4)]
    fleet.proxy.latency_s = 0.1
    async with playing(fleet, texts, num_tokens=100) as clients:
        for num_tokens in (5, 30, 60):
            await tokens_seen(fleet, clients, texts, num_tokens)
            fleet.proxy.reset()
    fleet.proxy.latency_s = 0.0
    assert clients.history.outcomes() == {FINISHED: 4}
