"""Workers as real processes: stopped by a signal, hung, and asked how they are."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from shared.protocol import Finished, SamplingParams
from shared.queue.registry import Registry
from tests.factories_queue import MODEL, make_request
from worker.engine_thread import Watchdog
from worker.health import HealthServer

ROOT = Path(__file__).parent.parent.parent
LONG = SamplingParams(max_tokens=100, temperature=0.7, seed=11, ignore_eos=True)


@pytest.fixture
def start_worker(redis_server, redis_prefix):
    """Start a worker process; returns when it is ready, and ends it when the block ends."""

    @asynccontextmanager
    async def start(name: str, **settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
        environment = {
            "VLM_REDIS_URL": redis_server,
            "VLM_REDIS__KEY_PREFIX": redis_prefix,
            "VLM_WORKER__ID": name,
            "VLM_WORKER__LEASE_S": "1",
            "VLM_ENGINE__KIND": "mock",
            "VLM_ENGINE__SERVED_NAME": MODEL,
            "VLM_ENGINE__MOCK__DECODE_S": "0.02",
            "VLM_ENGINE__MOCK__PREFILL_S_PER_TOKEN": "0",
        } | settings
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vlm", "worker", "--die-with-parent", str(os.getpid())),
            cwd=ROOT,
            env={**os.environ, **environment},
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            while b"is ready" not in (line := await process.stderr.readline()):
                assert line, "the worker ended before it was ready"
            process.ready_line = line.decode()  # type: ignore[attr-defined]
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    return start


async def test_sigterm_finishes_what_runs_and_ends_cleanly(ends, answers, start_worker, redis):
    async with start_worker("only") as worker:
        request = await ends.enqueue(make_request(sampling=LONG))
        await answers.tokens(request, 1)

        worker.send_signal(signal.SIGTERM)

        assert isinstance((await answers.end(request))[-1], Finished)
        assert await asyncio.wait_for(worker.wait(), 10) == 0
    registry = Registry(redis, ends.prefix)
    assert await registry.workers() == []
    await registry.close()


async def test_a_step_that_hangs_ends_the_process(ends, start_worker):
    settings = {"VLM_ENGINE__MOCK__DECODE_S": "60", "VLM_WORKER__WATCHDOG_S": "0.3"}
    async with start_worker("hung", **settings) as worker:
        await ends.enqueue(make_request(sampling=LONG))
        _, errors = await asyncio.wait_for(worker.communicate(), 10)

        assert worker.returncode == 70
        assert b"a step has taken longer" in errors
        assert b"in step" in errors  # the stack says where


async def test_a_worker_whose_step_is_stuck_is_not_healthy():
    step_started_at: float | None = None
    watchdog = Watchdog(60.0, lambda: step_started_at)
    server = HealthServer(lambda: not watchdog.is_stuck, lambda: True, lambda: None)
    await server.start("127.0.0.1", 0, "PORT")
    statuses = []
    async with httpx.AsyncClient(trust_env=False) as client:
        for age_s in (None, 0.0, 30.0, 60.0):
            step_started_at = None if age_s is None else time.monotonic() - age_s
            answer = await client.get(f"http://127.0.0.1:{server.port}/healthz")
            statuses.append(answer.status_code)
    await server.close()
    assert statuses == [200, 200, 200, 503]


async def test_probes_and_metrics_of_a_worker(ends, answers, start_worker):
    async with start_worker("probed") as worker:
        port = int(worker.ready_line.split("port ")[1].split()[0])
        await answers.end(await ends.enqueue(make_request(sampling=LONG)))
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False
        ) as client:
            assert (await client.get("/healthz")).status_code == 200
            async with asyncio.timeout(5):
                while (await client.get("/readyz")).status_code != 200:
                    await asyncio.sleep(0.02)
            assert (await client.get("/nothing")).status_code == 404
            assert (await client.post("/metrics")).status_code == 400
            metrics = (await client.get("/metrics")).text
    assert 'vlm_claims_total{kind="new"} 1.0' in metrics
    assert "vlm_num_requests_running 0.0" in metrics
    assert 'vlm_memory_bytes{use="kv_cache"}' in metrics
