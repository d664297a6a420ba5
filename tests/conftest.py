"""A real Redis server for the whole test run, on its own unix socket, and a key prefix per test."""

import gc
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from redis.asyncio import Redis
from xdist.scheduler import LoadFileScheduling

from shared.process import resolve_structs
from shared.redis.client import create_redis
from shared.redis.embedded import EmbeddedRedis, EmbeddedRedisError, find_redis_server
from shared.settings.tree import RedisSettings
from tests.factories_queue import Ends, open_ends

if not Path("/dev/nvidiactl").exists():
    # Without a GPU, kernels run in Triton's interpreter, which must be enabled before the first import of triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# More processes run than there are cores, so threads of torch must not spin while they wait for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


# Deadlines of examples are meaningless on a busy machine.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

# Objects created at import time stay; this keeps them out of every garbage collection.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    resolve_structs()
    gc.freeze()
    gc.enable()


#: Files that share a fleet or a browser, which starts in seconds: one test process runs all files of a group.
TOGETHER = {
    "tests/browser/": "browser",
    **dict.fromkeys(
        (f"tests/e2e/test_{name}.py" for name in (
            "doc_pages", "goals", "readme_snippets", "shapes_clip", "structured_output",
        )),
        "built-in models",
    ),
}  # fmt: skip


class ByFile(LoadFileScheduling):
    """Schedules whole files. One process at a time runs files of engines, which compute, while other files are left.

    The other files mostly wait for processes, and leave a core free.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((group for path, group in TOGETHER.items() if file.startswith(path)), file)

    def _assign_work_unit(self, node: Any) -> None:
        others = [work for each, work in self.assigned_work.items() if work and each is not node]
        is_computing = any(computes(next(reversed(work))) for work in others)
        if found := [file for file in self.workqueue if computes(file) is not is_computing]:
            self.workqueue.move_to_end(found[0], last=False)
        super()._assign_work_unit(node)


def computes(file: str) -> bool:
    return file.startswith("tests/engines/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session", params=["bundled", "redis-server", "valkey-server"])
def redis_program(request: pytest.FixtureRequest) -> Path:
    """Each installed Redis server in turn: the bundled one, and those on the PATH."""
    installed = shutil.which("redis-server" if request.param == "bundled" else request.param)
    try:
        first = find_redis_server()
    except EmbeddedRedisError as error:
        pytest.skip(str(error))
    if request.param == "bundled":
        return first
    if installed is None:
        pytest.skip(f"no {request.param} on the PATH")
    if Path(installed).resolve() == first.resolve():
        pytest.skip(f"{first} is the one on the PATH too: there is no bundled one beside it")
    return Path(installed)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """The URL of a server that only this test run uses."""
    with tempfile.TemporaryDirectory(prefix="vlm-tests-") as folder:
        server = EmbeddedRedis(Path(folder))
        yield server.start()
        server.stop()


@pytest.fixture
def redis_prefix() -> str:
    """A unique key prefix."""
    return f"t{uuid4().hex[:12]}"


@pytest.fixture
async def redis(redis_server: str) -> AsyncIterator[Redis]:
    """A client with the settings of production."""
    async with create_redis(RedisSettings(url=redis_server)) as client:
        yield client


@pytest.fixture
async def redis_blocking(redis_server: str) -> AsyncIterator[Redis]:
    """A client for blocking reads."""
    async with create_redis(RedisSettings(url=redis_server), blocking=True) as client:
        yield client


@pytest.fixture
async def ends(redis: Redis, redis_blocking: Redis, redis_prefix: str) -> AsyncIterator[Ends]:
    """A queue, and as many workers on it as the test requests."""
    async with open_ends(redis, redis_blocking, redis_prefix) as ends:
        yield ends
