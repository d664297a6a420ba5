"""Faults of real processes, short form, which every test run includes. The long form is `test_faults_long`.

Faults occur at named points of a request or a stream, never after a time. Each test ends by checking all promises.
"""

import asyncio
import json
import signal
from collections import Counter

import httpx
import pytest

from tests.faults.clients import Clients, answer_to, body_of
from tests.faults.fleet import playing, tokens_seen, used
from tests.faults.history import CANCELLED, FAILED, FINISHED
from tests.faults.processes import WITHIN_S
from tests.faults.rest import Resources, growth

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


async def test_an_answer_with_a_schema_continues_when_its_worker_is_killed(fleet):
    """P3: the other worker continues the grammar after the last token."""
    victim = await fleet.only_worker()
    schema = {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 5}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text = fleet.name("!kill-decode")
    body = body_of(text)
    body |= {"response_format": form, "ignore_eos": False, "stream": False, "max_tokens": 100}
    async with httpx.AsyncClient(trust_env=False, timeout=WITHIN_S, verify=False) as client:
        asked = asyncio.create_task(client.post(f"{fleet.url}/v1/chat/completions", json=body))
        assert await victim.ended() == -signal.SIGKILL
        await fleet.worker()
        answer = (await asked).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    content = answer["message"]["content"]
    assert 3 <= len(json.loads(content)) <= 5
    assert content == "".join(answer_to(text, 100, json.dumps(schema))).strip()
    await fleet.at_rest()


async def test_a_request_that_kills_every_worker_fails_no_other(fleet):
    """P5: it kills three workers at most, and gets a clear error and a dead letter; other requests finish."""
    victim = await fleet.only_worker()
    poison = fleet.name("!kill-always")
    async with playing(fleet, [poison, *(fleet.name() for _ in range(3))]) as clients:
        for _ in range(3):
            assert await victim.ended() == -signal.SIGKILL
            victim = await fleet.worker()
    assert victim.lives
    assert clients.history.outcomes() == {FINISHED: 3, FAILED: 1}
    assert clients.errors[poison]["code"] == "request_kills_workers"
    [letter] = await fleet.dead_letters()
    assert letter[b"reason"] == b"kills_workers"


async def test_a_failing_sequence_fails_only_its_request(fleet):
    await fleet.some_worker()
    text = fleet.name("!raise")
    async with playing(fleet, [text, fleet.name(), fleet.name()]) as clients:
        pass
    assert clients.history.outcomes() == {FAILED: 1, FINISHED: 2}
    assert clients.errors[text]["code"] == "engine_failure"


async def test_clients_that_disconnect_free_their_slots_and_leave_nothing(fleet):
    """P7: the resources of processes and Redis are the same as before."""
    worker = await fleet.some_worker()
    async with playing(fleet, [fleet.name() for _ in range(4)]):
        pass
    pids = (fleet.gateway.pid, worker.pid)
    before = [Resources.of(pid) for pid in pids]
    async with playing(fleet, [fleet.name() for _ in range(8)], leave_after=3) as clients:
        pass
    assert clients.history.outcomes() == {CANCELLED: 8}

    async def is_back() -> bool:
        return not any(
            growth(old, Resources.of(pid)) for old, pid in zip(before, pids, strict=True)
        )

    await fleet.until(is_back)


async def test_workers_join_and_leave_under_load_without_a_failed_request(fleet):
    """P4: workers join and leave without configuration."""
    first = await fleet.only_worker()
    texts = [fleet.name() for _ in range(24)]
    async with playing(fleet, texts) as clients:
        await tokens_seen(fleet, clients, texts[:1], 5)
        await fleet.worker()
        first.signal(signal.SIGTERM)
        assert await first.ended() == 0
    assert clients.history.outcomes() == {FINISHED: 24}


async def test_streams_continue_when_redis_has_lost_all_its_data(fleet):
    """P4: the gateway queues its open requests again, and clients get the same answers."""
    await fleet.some_worker()
    texts = [fleet.name() for _ in range(3)]
    async with playing(fleet, texts, num_tokens=120) as clients:
        await tokens_seen(fleet, clients, texts, 10)
        await fleet.redis.flushall()
    assert clients.history.outcomes() == {FINISHED: 3}
    assert await used(fleet) == Counter(requests=3, output_tokens=360)


async def test_a_worker_and_redis_killed_in_decode_are_not_noticed_by_any_client(fleet):
    """P2, P3, P4: the answers equal those without faults, and are counted once."""
    victim = await fleet.only_worker()
    before = await used(fleet)
    texts = [fleet.name("!kill-decode"), *(fleet.name() for _ in range(3))]
    async with playing(fleet, texts, num_tokens=120) as clients:
        assert await victim.ended() == -signal.SIGKILL
        assert clients.history.outcomes() == Counter()
        await fleet.worker()
        await tokens_seen(fleet, clients, texts, 10)
        fleet.processes.kill_redis()
        await asyncio.to_thread(fleet.processes.server.start)
    assert clients.history.outcomes() == {FINISHED: 4}
    assert await fleet.dead_letters() == []
    assert await used(fleet) - before == Counter(requests=4, output_tokens=480)


async def test_a_request_ends_once_if_its_last_reply_is_lost(fleet):
    """P1: the worker dies after Redis accepted the last event, before the reply arrives."""
    victim = await fleet.only_worker()
    async with playing(fleet, [fleet.name("!kill-finish")]) as clients:
        assert await victim.ended() == -signal.SIGKILL
    assert clients.history.outcomes() == {FINISHED: 1}


async def test_a_second_signal_ends_a_gateway_and_its_streams(fleet):
    """The first signal would let the streams finish."""
    await fleet.some_worker()
    gateway, url = await fleet.processes.gateway()
    clients, text = Clients(), fleet.name()
    asked = asyncio.create_task(clients.ask(url, text, num_tokens=200))
    await tokens_seen(fleet, clients, [text], 5)

    async def is_draining() -> bool:
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            return (await client.get(f"{url}/readyz")).json() == {"status": "draining"}

    gateway.signal(signal.SIGTERM)
    await fleet.until(is_draining)
    gateway.signal(signal.SIGTERM)
    await gateway.ended()
    await asked
    assert clients.history.outcomes() == {FAILED: 1}
    assert clients.history.violations() == []
    await fleet.at_rest()
