"""Faults of gateways, long form (`make faults`): killed, stopped, replaced, out of descriptors, with nobody at their log.

Each test ends with all promises checked.
"""

import asyncio
import json
import signal
import time

import httpx
import psutil
import pytest

from tests.faults.clients import Clients, answer_to, body_of
from tests.faults.fleet import streaming, tokens_seen, used
from tests.faults.history import FAILED, FINISHED, REFUSED
from tests.faults.processes import PREFIX, WITHIN_S
from tests.long import long

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    long("faults"),
]


async def test_a_gateway_that_is_killed_takes_its_requests_with_it(fleet):
    """Nobody waits for them any more: they are cancelled and counted, and their slots are free."""
    await fleet.some_worker()
    before = await used(fleet)
    gateway, url = await fleet.processes.gateway()
    clients = Clients()
    texts = [fleet.name() for _ in range(3)]
    asked = [asyncio.create_task(clients.ask(url, t, num_tokens=4000)) for t in texts]
    await tokens_seen(fleet, clients, texts, 5)

    began = time.monotonic()
    await gateway.end()
    await asyncio.gather(*asked)
    await fleet.until(lambda: _has_cancelled(fleet, 3))

    assert clients.history.violations() == []
    assert time.monotonic() - began < 60
    counted = await used(fleet) - before
    assert counted["requests"] == 3
    assert counted["output_tokens"] == await _tokens_of_cancelled(fleet)
    seen = sum(len(clients.history.tokens(text)) for text in texts)
    assert counted["output_tokens"] >= seen > 0
    await fleet.at_rest()


async def _tokens_of_cancelled(fleet) -> int:
    keys = [key async for key in fleet.redis.scan_iter(f"{PREFIX}:*request:*", count=1000)]
    found = [await fleet.redis.hmget(key, "state", "tokens") for key in keys]
    return sum(int(tokens) for state, tokens in found if state == b"cancelled")


async def _has_cancelled(fleet, count: int) -> bool:
    keys = [key async for key in fleet.redis.scan_iter(f"{PREFIX}:*request:*", count=1000)]
    states = [await fleet.redis.hget(key, "state") for key in keys]
    return states.count(b"cancelled") >= count and b"running" not in states


async def test_processes_whose_log_is_gone_go_on(fleet):
    """Nobody reads what they say any more: each line is a broken pipe."""
    await fleet.retire_workers()
    worker = await fleet.worker()
    gateway, url = await fleet.processes.gateway()
    for process in (worker, gateway):
        process.close_log()
    clients = Clients()
    texts = [fleet.name() for _ in range(3)]
    await asyncio.gather(*(clients.ask(url, text) for text in texts))
    assert clients.history.violations() == []
    assert clients.history.outcomes() == {FINISHED: 3}
    await fleet.at_rest()
    await fleet.retire_workers()
    await gateway.end()


async def test_a_gateway_that_stands_still_for_two_seconds_drops_no_stream(fleet):
    await fleet.some_worker()
    async with streaming(fleet, 3, num_tokens=150) as clients:
        fleet.gateway.signal(signal.SIGSTOP)
        await asyncio.sleep(2.0)  # the fault itself
        fleet.gateway.signal(signal.SIGCONT)
    assert clients.history.outcomes() == {FINISHED: 3}


async def test_a_gateway_without_file_descriptors_lives_and_serves_again(fleet):
    await fleet.some_worker()
    gateway, url = await fleet.processes.gateway()
    process = psutil.Process(gateway.pid)
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 12, 1024))
    port = httpx.URL(url).port
    crowd = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", port) for _ in range(40)), return_exceptions=True
    )
    assert process.num_fds() <= process.rlimit(psutil.RLIMIT_NOFILE)[0]
    for pair in crowd:
        if not isinstance(pair, BaseException):
            pair[1].close()

    async def is_served() -> bool:
        clients = Clients()
        await clients.ask(url, text := fleet.name())
        return clients.history.outcome(text) == FINISHED

    await fleet.until(is_served, 30.0)
    assert gateway.process.returncode is None
    await gateway.end()


async def test_a_stream_of_a_killed_gateway_goes_on_at_another(fleet):
    await fleet.some_worker()
    gateway, url = await fleet.processes.gateway()
    text = fleet.name()
    tokens: list[str] = []
    path, last_id = "", 0
    async with httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as client:
        headers = {"x-vlm-resumable": "true"}
        body = body_of(text, 200)
        with pytest.raises(httpx.HTTPError):  # noqa: PT012
            async with client.stream(
                "POST", f"{url}/v1/chat/completions", json=body, headers=headers
            ) as response:
                path = response.headers["x-vlm-stream"]
                async for line in response.aiter_lines():
                    last_id = _note(line, last_id, tokens)
                    if len(tokens) >= 20:
                        await gateway.end()
        headers = {"last-event-id": str(last_id)}
        async with client.stream("GET", fleet.url + path, headers=headers) as response:
            async for line in response.aiter_lines():
                last_id = _note(line, last_id, tokens)
    assert tokens == list(answer_to(text, 200))
    await fleet.at_rest()


def _note(line: str, last_id: int, tokens: list[str]) -> int:
    if line.startswith("id: "):
        return int(line[4:])
    if line.startswith("data: {"):
        for choice in json.loads(line[6:])["choices"]:
            tokens += [e["token"] for e in (choice.get("logprobs") or {}).get("content") or ()]
    return last_id


async def test_gateways_and_workers_are_replaced_under_load_without_a_failed_request(fleet):
    """P4: each in turn is told to stop, and clients go to one that is not."""
    await fleet.retire_workers()
    gateways = [(fleet.gateway, fleet.url), await fleet.processes.gateway()]
    workers = [await fleet.worker() for _ in range(2)]
    clients, tasks = Clients(), []
    is_over = asyncio.Event()

    async def ask_until_taken(number: int) -> None:
        """What a gateway refuses because it stops, another takes."""
        while True:
            _, url = gateways[number % len(gateways)]
            name = fleet.name()
            await clients.ask(url, name)
            if clients.history.outcome(name) != REFUSED:
                return

    async def keep_asking() -> None:
        while not is_over.is_set():
            tasks.append(asyncio.create_task(ask_until_taken(len(tasks))))
            await asyncio.sleep(0.3)

    load = asyncio.create_task(keep_asking())
    for _ in range(2):
        old, _ = gateways.pop(0)
        old.signal(signal.SIGTERM)
        new = await fleet.processes.gateway()
        assert await old.ended() == 0
        gateways.append(new)
        fleet.gateway, fleet.url = new
        worker = workers.pop(0)
        worker.signal(signal.SIGTERM)
        workers.append(await fleet.worker())
        assert await worker.ended() == 0
    is_over.set()
    await load
    await asyncio.gather(*tasks)
    assert clients.history.violations() == []
    outcomes = clients.history.outcomes()
    assert outcomes[FINISHED] == len(tasks) > 8
    assert outcomes[FAILED] == 0
    await fleet.at_rest()
