"""Worker processes: stopped by a signal, hung, and probed."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import httpx
import pytest

from shared.protocol import SamplingParams
from tests.factories_queue import MODEL, make_request
from tests.factories_worker import load_mock
from tests.faults.processes import Process, Processes
from tests.waiting import until
from worker.engine_thread import EngineThread
from worker.health import HealthServer

LONG = SamplingParams(max_tokens=100, temperature=0.7, seed=11, ignore_eos=True)


@pytest.fixture
async def start(
    redis, redis_server, redis_prefix
) -> AsyncIterator[Callable[..., Awaitable[Process]]]:
    """Returns a function that starts a worker process and waits until it is ready."""
    processes = Processes(None, redis, redis_server)
    settings = {
        "VLM_REDIS__KEY_PREFIX": redis_prefix, "VLM_ENGINE__SERVED_NAME": MODEL, "VLM_ENGINE__MOCK__DECODE_S": "0.02",
    }  # fmt: skip
    command = ("vlm", "worker", "--engine", "mock")
    yield partial(processes.worker, "w", command=command, **settings)
    await processes.close()


async def test_a_step_that_hangs_ends_the_process(ends, start):
    worker = await start(VLM_ENGINE__MOCK__DECODE_S="60", VLM_WORKER__WATCHDOG_S="0.3")
    await ends.enqueue(make_request(sampling=LONG))
    await worker.says("a step has taken longer")
    await worker.says("in step")  # the stack trace names the function
    assert await worker.ended() == 70


async def test_a_worker_whose_step_is_stuck_is_not_healthy():
    engine = EngineThread(load_mock)
    server = HealthServer(lambda: not engine.is_stuck(60.0), lambda: True, lambda: None)
    await server.start("127.0.0.1", 0, "PORT")
    statuses = []
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        for age_s in (None, 0.0, 30.0, 60.0):
            engine.step_started_at = None if age_s is None else time.monotonic() - age_s
            answer = await client.get(f"http://127.0.0.1:{server.port}/healthz")
            statuses.append(answer.status_code)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"HEAD /healthz HTTP/1.1\r\n\r\n")
    assert (await reader.read()).endswith(b"\r\n\r\n")
    writer.close()
    await server.close()
    assert statuses == [200, 200, 200, 503]


async def test_probes_and_metrics_of_a_worker(ends, answers, start):
    port = (await (await start()).says("is ready")).split("port ")[1].split()[0]
    await answers.end(await ends.enqueue(make_request(sampling=LONG)))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        assert (await client.get("/healthz")).status_code == 200

        async def is_ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await until(is_ready)
        assert (await client.get("/nothing")).status_code == 404
        assert (await client.post("/metrics")).status_code == 400
        metrics = (await client.get("/metrics")).text
    assert 'vlm_claims_total{kind="new"} 1.0' in metrics
    assert "vlm_num_requests_running 0.0" in metrics
    assert 'vlm_memory_bytes{use="kv_cache"}' in metrics
