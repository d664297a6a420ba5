"""Faults of real processes, long form (`make faults`): every row of `docs/reliability.md` that takes its time.

Faults come at named points of a request or of a stream; each test ends with all promises checked (`playing`).
"""

import asyncio
import json
import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from tests.faults.clients import Clients, answer_to, body_of
from tests.faults.conftest import IS_LONG
from tests.faults.fleet import KEYS, playing, tokens_seen
from tests.faults.history import FAILED, FINISHED, REFUSED
from tests.faults.processes import MODEL, PREFIX, WITHIN_S
from tests.faults.rest import Resources, growth

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(not IS_LONG, reason="the long form: make faults"),
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
    assert clients.errors[poison]["code"] == "too_many_attempts"
    [letter] = await fleet.dead_letters()
    assert letter[b"reason"] == b"exhausted"


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
    texts = [fleet.name() for _ in range(4)]
    async with playing(fleet, texts, num_tokens=100) as clients:
        for text in texts:
            await tokens_seen(fleet, clients, text, 5)
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
        for text in texts:
            await tokens_seen(fleet, clients, text, 5)
        zombie.signal(signal.SIGSTOP)
        await fleet.worker()
        for text in texts:
            await tokens_seen(fleet, clients, text, 60)
        zombie.signal(signal.SIGCONT)
    assert clients.history.outcomes() == {FINISHED: 3}
    await zombie.says("no longer ours")


async def test_two_workers_of_one_name_do_no_harm(fleet):
    await fleet.retire_workers()
    await fleet.processes.worker("worker-twin")
    await fleet.processes.worker("worker-twin")
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


async def test_a_redis_that_is_emptied_ends_streams_with_one_error(fleet):
    await fleet.some_worker()
    texts = [fleet.name() for _ in range(3)]
    async with playing(fleet, texts, num_tokens=400) as clients:
        for text in texts:
            await tokens_seen(fleet, clients, text, 5)
        await fleet.redis.flushall()
    assert clients.history.outcomes() == {FAILED: 3}
    assert {error["code"] for error in clients.errors.values()} == {"worker_lost"}
    async with playing(fleet, [fleet.name()]) as clients:
        pass
    assert clients.history.outcomes() == {FINISHED: 1}


@pytest.mark.parametrize("fault", ["full", "read-only", "disk"])
async def test_a_redis_that_takes_no_writes_refuses_new_requests_and_keeps_old_ones(
    fleet, fault, tmp_path
):
    await fleet.some_worker()
    texts = [fleet.name() for _ in range(2)]
    break_, mend = {
        "full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
        "read-only": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        "disk": (("BGSAVE",), ("CONFIG", "SET", "save", "")),
    }[fault]
    if fault == "disk":
        await _make_snapshots_fail(fleet, tmp_path / "gone")
    async with playing(fleet, texts, num_tokens=150) as clients:
        for text in texts:
            await tokens_seen(fleet, clients, text, 5)
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


async def test_a_gateway_that_is_killed_takes_its_requests_with_it(fleet):
    """Nobody waits for them any more: they are cancelled, and their slots are free."""
    await fleet.some_worker()
    gateway, url = await fleet.processes.gateway()
    clients = Clients()
    texts = [fleet.name() for _ in range(3)]
    asked = [asyncio.create_task(clients.ask(url, t, num_tokens=4000)) for t in texts]
    for text in texts:
        await tokens_seen(fleet, clients, text, 5)

    began = time.monotonic()
    await gateway.end()
    await asyncio.gather(*asked)
    await fleet.until(lambda: _has_cancelled(fleet, 3))

    assert clients.history.violations() == []
    assert time.monotonic() - began < 60
    await fleet.at_rest()


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
    texts = [fleet.name() for _ in range(3)]
    async with playing(fleet, texts, num_tokens=150) as clients:
        for text in texts:
            await tokens_seen(fleet, clients, text, 5)
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
