"""Faults of real processes and their connections, long form (`make faults`), as listed in docs/reliability.md.

Faults occur at named points of a request or a stream. Each test ends by checking all promises (`playing`).
"""

import asyncio
import json
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from shared.queue.scripts import CLAIM, PUBLISH, SUBMIT
from tests.faults.clients import Clients, answer_to, body_of, tokens_in
from tests.faults.fleet import KEYS, playing, streaming, tokens_seen, used
from tests.faults.history import FAILED, FINISHED, REFUSED
from tests.faults.processes import MODEL, PREFIX, WITHIN_S
from tests.faults.proxy import run_proxy
from tests.long import long

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900), long("faults")]

CHAT = "/v1/chat/completions"
NUM_LINES = 80  #: of a batch
#: For a request sent while Redis is silent: three tries of 2 s, on a slow machine.
REFUSED_WITHIN_S = 15.0


# Workers


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


@pytest.mark.parametrize("is_cut_off", [False, True], ids=["zombie", "cut off"])
async def test_a_worker_that_returns_after_its_lease_adds_nothing(fleet, is_cut_off):
    """Another worker continues, and the events of the first one are refused when it is back."""
    await fleet.retire_workers()
    async with run_proxy(fleet.processes.server.socket_path) as link:
        first = await fleet.worker(VLM_REDIS_URL=link.url)
        texts = [fleet.name() for _ in range(3)]
        async with playing(fleet, texts, num_tokens=100) as clients:
            await tokens_seen(fleet, clients, texts, 5)
            if is_cut_off:
                link.freeze()
            else:
                first.signal(signal.SIGSTOP)
            await fleet.worker()
            await tokens_seen(fleet, clients, texts, 60)
            link.thaw()
            first.signal(signal.SIGCONT)
        assert clients.history.outcomes() == {FINISHED: 3}
        await first.says("no longer belongs to this worker")
        await first.end()


async def test_an_entry_delivered_twice_runs_once_and_waits_for_a_worker(fleet):
    await fleet.retire_workers()

    async def are_queued() -> bool:
        return await fleet.redis.xlen(KEYS.queue(MODEL)) >= 3

    async with playing(fleet, [fleet.name() for _ in range(3)]) as clients:
        await fleet.until(are_queued)
        for _, fields in await fleet.redis.xrange(KEYS.queue(MODEL)):
            await fleet.redis.xadd(KEYS.queue(MODEL), fields)
        await fleet.worker()
    assert clients.history.outcomes() == {FINISHED: 3}


# Redis


@pytest.mark.parametrize("fault", ["full", "read-only", "disk"])
async def test_a_read_only_redis_refuses_new_requests_and_keeps_old_ones(fleet, fault, tmp_path):
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
        await _is_refused_soon(fleet)
        await fleet.redis.execute_command(*mend)
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


async def _is_refused_soon(fleet) -> None:
    late, text, began_at = Clients(), fleet.name(), time.monotonic()
    await late.ask(fleet.url, text)
    assert late.history.outcome(text) == REFUSED, late.errors
    print(f"refused after {time.monotonic() - began_at:.1f} s")
    assert time.monotonic() - began_at < REFUSED_WITHIN_S


@pytest.mark.parametrize(("frozen_s", "for_workers_too"), [(60.0, True), (10.0, False)])
async def test_a_redis_that_is_silent_loses_nothing(fleet, frozen_s, for_workers_too):
    """New requests are refused soon; streams pause and continue."""
    await fleet.retire_workers()
    server, link = fleet.processes.server, fleet.proxy
    await fleet.worker(VLM_REDIS_URL=link.url if for_workers_too else server.url)
    async with streaming(fleet, 3, num_tokens=150) as clients:
        link.freeze()
        thawed_at = time.monotonic() + frozen_s
        await _is_refused_soon(fleet)
        await asyncio.sleep(thawed_at - time.monotonic())  # duration of the fault
        link.thaw()
    assert clients.history.outcomes() == {FINISHED: 3}
    await fleet.retire_workers()  # one worker is not behind the proxy


async def test_half_open_connections_time_out(fleet):
    """Redis considers them alive and still delivers to them, and no FIN or RST arrives."""
    await fleet.some_worker()
    async with streaming(fleet, 3, num_tokens=150) as clients:
        fleet.proxy.half_open()
    assert clients.history.outcomes() == {FINISHED: 3}
    assert clients.history.longest_pause_s() < 15.0


COMMANDS = {
    "submit": SUBMIT.sha, "claim": CLAIM.sha, "publish": PUBLISH.sha, "read": "XREADGROUP", "mailbox": "XREAD\r\n",
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
async def test_a_lost_reply_of_any_command_changes_nothing(fleet, command):
    await fleet.some_worker()
    async with playing(fleet, [fleet.name() for _ in range(3)], num_tokens=100) as clients:
        is_lost = fleet.proxy.drop_next_reply(COMMANDS[command].encode())
        await asyncio.wait_for(is_lost.wait(), WITHIN_S)
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


# Gateways


async def test_requests_of_a_killed_gateway_are_cancelled(fleet):
    """They are cancelled and counted, and their slots are free."""
    await fleet.some_worker()
    before = await used(fleet)
    gateway, url = await fleet.processes.gateway()
    clients = Clients()
    texts = [fleet.name() for _ in range(3)]
    asked = [asyncio.create_task(clients.ask(url, t, num_tokens=4000)) for t in texts]
    await tokens_seen(fleet, clients, texts, 5)
    await gateway.end()
    await asyncio.gather(*asked)

    async def cancelled_tokens() -> list[int]:
        keys = [key async for key in fleet.redis.scan_iter(f"{PREFIX}:*request:*", count=1000)]
        found = [await fleet.redis.hmget(key, "state", "tokens") for key in keys]
        return [int(tokens) for state, tokens in found if state == b"cancelled"]

    async def are_cancelled() -> bool:
        return len(await cancelled_tokens()) == 3

    await fleet.until(are_cancelled, 60.0)
    await fleet.at_rest()
    assert clients.history.violations() == []
    counted = await used(fleet) - before
    assert counted["requests"] == 3
    assert counted["output_tokens"] == sum(await cancelled_tokens())
    seen = sum(len(clients.history.tokens(text)) for text in texts)
    assert counted["output_tokens"] >= seen > 0


async def test_a_gateway_without_file_descriptors_recovers(fleet):
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
    assert gateway.lives
    await gateway.end()


async def test_a_stream_of_a_killed_gateway_continues_at_another(fleet):
    await fleet.some_worker()
    gateway, url = await fleet.processes.gateway()
    body, tokens, last_id = body_of(fleet.name(), 200), list[str](), "0"

    async def read(**request) -> str:
        """Reads a stream and kills its gateway at the 20th token. Returns the path to resume it."""
        nonlocal last_id
        async with client.stream(**request) as response:
            path = response.headers.get("x-vlm-stream", "")
            with suppress(httpx.HTTPError):
                async for line in response.aiter_lines():
                    if line.startswith("id: "):
                        last_id = line.removeprefix("id: ")
                    elif line.startswith("data: {"):
                        tokens.extend(tokens_in(json.loads(line.removeprefix("data: "))))
                    if len(tokens) >= 20:
                        await gateway.end()
        return path

    async with httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as client:
        headers = {"x-vlm-resumable": "true"}
        path = await read(method="POST", url=f"{url}{CHAT}", json=body, headers=headers)
        assert 20 <= len(tokens) < 200
        await read(method="GET", url=fleet.url + path, headers={"last-event-id": last_id})
    assert tokens == list(answer_to(body["messages"][0]["content"], 200))
    await fleet.at_rest()


async def test_gateways_and_workers_are_replaced_under_load_without_a_failed_request(fleet):
    """P4: the processes are stopped one after another, and clients use the other gateway."""
    await fleet.retire_workers()
    gateways = [(fleet.gateway, fleet.url), await fleet.processes.gateway()]
    workers = [await fleet.worker() for _ in range(2)]
    clients, tasks = Clients(), []
    is_over = asyncio.Event()

    async def ask_until_taken(number: int) -> None:
        """Asks again at another gateway while one refuses because it stops."""
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
        gateways.append(await fleet.processes.gateway())
        assert await old.ended() == 0
        fleet.gateway, fleet.url = gateways[-1]
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


async def test_a_batch_continues_after_any_kill(fleet, tmp_path_factory):
    """P3, P4: a gateway, then a worker, then Redis is killed while lines run; each line is answered once."""
    files = {"VLM_GATEWAY__FILES": f"file://{tmp_path_factory.mktemp('files')}"}
    victim = await fleet.worker()
    first, url = await fleet.processes.gateway(**files)
    texts = [fleet.name() for _ in range(NUM_LINES)]
    async with httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as client:
        batch = await _begin_batch(client, url, texts)
        await _batch_has(client, url, batch, 10)
        await first.end()
        second, url = await fleet.processes.gateway(**files)
        await _batch_has(client, url, batch, 30)
        await fleet.worker()
        victim.signal(signal.SIGKILL)
        fleet.processes.kill_redis()
        await asyncio.to_thread(fleet.processes.server.start)
        done = await _batch_has(client, url, batch, NUM_LINES, "completed")
        assert done["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        content = (await client.get(f"{url}/v1/files/{done['output_file_id']}/content")).text
    lines = [json.loads(line) for line in content.splitlines()]
    told = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in lines
    }
    assert len(lines) == NUM_LINES
    assert told == {text: "".join(answer_to(text)).strip() for text in texts}
    await second.end()
    await fleet.at_rest()


async def _begin_batch(client, url, texts):
    plain = {"stream": False, "logprobs": False}
    lines = [
        {"custom_id": text, "method": "POST", "url": CHAT, "body": {**body_of(text), **plain}}
        for text in texts
    ]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", data)}}
    file = await client.post(f"{url}/v1/files", **form)
    body = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
    return (await client.post(f"{url}/v1/batches", json=body)).json()["id"]


async def _batch_has(client, url, batch, num_completed, status=""):
    async with asyncio.timeout(WITHIN_S):
        while True:
            found = (await client.get(f"{url}/v1/batches/{batch}")).json()
            is_whole = "id" in found and status in ("", found["status"])
            if is_whole and found["request_counts"]["completed"] >= num_completed:
                return found
            await asyncio.sleep(0.1)


async def test_streams_continue_after_twenty_seconds_without_workers(fleet):
    await fleet.retire_workers()
    workers = [await fleet.worker() for _ in range(2)]
    async with streaming(fleet, 4, num_tokens=100) as clients:
        for worker in workers:
            await worker.end()
        await asyncio.sleep(20.0)  # duration of the fault
        await fleet.worker()
    assert clients.history.outcomes() == {FINISHED: 4}
