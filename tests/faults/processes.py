"""Real processes around their own Redis, which tests kill, stop and restart."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from redis import Redis as SyncRedis
from redis.asyncio import Redis

from shared.redis.client import create_redis
from shared.redis.embedded import EmbeddedRedis
from shared.settings.tree import RedisSettings
from tests.factories_queue import wait_until_written
from tests.waiting import until

ROOT = Path(__file__).parent.parent.parent
WITHIN_S = 120.0  #: for any event, on a busy machine
LEASE_S = 3.0
REQUEST_TIMEOUT_S = 90.0
PREFIX = "faults"
MODEL = "mock"
FAULTY = ("tests.faults.faulty_worker",)
#: A worker for embeddings.
FAULTY_POOLING = (*FAULTY, "--engine", "mock_pooling")
_ENGINE = {"VLM_ENGINE__MOCK__DECODE_S": "0.02", "VLM_ENGINE__MOCK__PREFILL_S_PER_TOKEN": "0"}


class Process:
    """One process, its exit code and its output."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.lines: list[str] = []
        self._reader = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def lives(self) -> bool:
        return self.process.returncode is None

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode(errors="replace"))

    async def says(self, words: str) -> str:
        """Waits for the first line with these words; returns it."""

        def found() -> str:
            return next((line for line in self.lines if words in line), "")

        await until(lambda: found() or self._reader.done(), WITHIN_S)
        assert found(), f"{self.name} never said {words!r}:\n" + "".join(self.lines[-20:])
        return found()

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    async def ended(self) -> int:
        """Waits for the end of the process; returns its exit code."""
        return await asyncio.wait_for(self.process.wait(), WITHIN_S)

    async def end(self) -> None:
        if self.lives:
            self.signal(signal.SIGKILL)
        await self.process.wait()
        await self._reader


class Processes:
    """Gateways and workers by name, and their Redis."""

    def __init__(self, server: EmbeddedRedis | None, redis: Redis, redis_url: str) -> None:
        self.server = server
        self.redis = redis
        self.redis_url = redis_url  #: URL for new processes, possibly of a proxy
        self.all: list[Process] = []

    async def start(self, name: str, *command: str, **variables: str) -> Process:
        environment = {
            "VLM_REDIS_URL": self.redis_url,
            "VLM_REDIS__KEY_PREFIX": PREFIX,
            "VLM_GATEWAY__REQUEST_TIMEOUT_S": str(REQUEST_TIMEOUT_S),
            "TEST_GATEWAY_CONSTANTS": "silence_timeout_s=2",
            "VLM_WORKER__LEASE_S": str(LEASE_S),
            **variables,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *command,
            cwd=ROOT, env={**os.environ, **environment}, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self.all.append(Process(name, process))
        return self.all[-1]

    async def worker(
        self, name: str, command: tuple[str, ...] = FAULTY, **variables: str
    ) -> Process:
        """Starts a worker and waits until it is ready. By default it plays the faults named in prompts."""
        variables["VLM_WORKER__ID"] = name
        if command == FAULTY:
            variables = {**_ENGINE, **variables}
        process = await self.start(name, *command, **variables)
        await process.says("is ready")
        return process

    async def gateway(self, **variables: str) -> tuple[Process, str]:
        """Starts a gateway and waits until it listens; returns it and its URL."""
        options = ("--port", "0", "--die-with-parent", str(os.getpid()))
        command = ("tests.factories_settings", "gateway", *options)
        process = await self.start("gateway", *command, **variables)
        line = await process.says("gateway listens")
        found = re.search(r"http://[\d.:]+", line)
        assert found is not None
        return process, found[0]

    def kill_redis(self) -> None:
        """Kills Redis after its acknowledged writes are in its file."""
        assert self.server is not None
        assert self.server.pid is not None
        with SyncRedis(unix_socket_path=str(self.server.socket_path)) as client:
            wait_until_written(client)
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()

    async def close(self) -> None:
        for process in self.all:
            process.signal(signal.SIGCONT)
            await process.end()


@asynccontextmanager
async def run_processes(folder: Path, redis_url: str = "") -> AsyncIterator[Processes]:
    """Runs a Redis for processes. `redis_url`: the URL for them, if it differs."""
    with EmbeddedRedis(folder) as server:
        redis = create_redis(RedisSettings(url=server.url))
        processes = Processes(server, redis, redis_url or server.url)
        try:
            yield processes
        finally:
            await processes.close()
            await redis.aclose()
