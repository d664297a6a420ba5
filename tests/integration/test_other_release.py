"""Processes of this version beside those of release 0.1.0, which has the same protocol version."""

import io
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.fleet import Fleet, playing, tokens_seen
from tests.faults.history import FINISHED
from tests.faults.processes import ROOT, Process, run_processes

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: The last commit of the release.
COMMIT = "2ca2ff1"
NUM_STREAMS = 8


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source of the release."""
    folder = tmp_path_factory.mktemp("release")
    archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True)
    if archive.returncode != 0:
        pytest.skip("not a git repository with the history")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tree:
        tree.extractall(folder, filter="data")
    assert 'version = "0.1.0"' in (folder / "pyproject.toml").read_text()
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """A fleet whose gateway has this version."""
    async with run_processes(tmp_path_factory.mktemp("fleet")) as processes:
        gateway, url = await processes.gateway()
        yield Fleet(processes, gateway, url)


def of_release(release: Path) -> dict[str, str]:
    """Returns the environment in which Python imports only the release."""
    return {"PYTHONPATH": str(release), "PYTHONSAFEPATH": "1", "VLM_ENGINE__MOCK__DECODE_S": "0.02"}


async def start_old_worker(fleet: Fleet, release: Path) -> Process:
    command = ("vlm", "worker", "--engine", "mock")
    return await fleet.worker(command=command, **of_release(release))


async def test_a_request_continues_on_a_worker_of_the_other_version(fleet, release):
    """An update replaces workers one by one; each continues the requests of the other version."""
    old = await start_old_worker(fleet, release)
    texts = [fleet.name() for _ in range(NUM_STREAMS)]
    async with playing(fleet, texts, num_tokens=100) as clients:
        await tokens_seen(fleet, clients, texts, 10)
        new = await fleet.worker()
        old.process.kill()
        await tokens_seen(fleet, clients, texts, 40)
        await start_old_worker(fleet, release)
        new.process.kill()
    assert clients.history.outcomes() == {FINISHED: NUM_STREAMS}


async def test_a_gateway_of_the_release_is_served_by_workers_of_both(fleet, release):
    command = ("vlm", "gateway", "--port", "0")
    process = await fleet.processes.start("old gateway", *command, **of_release(release))
    fleet.url = (await process.says("gateway listens")).partition("http://")[2].split()[0]
    fleet.url = f"http://{fleet.url}"
    await start_old_worker(fleet, release)
    await fleet.worker()
    texts = [fleet.name() for _ in range(NUM_STREAMS)]
    async with playing(fleet, texts, num_tokens=30) as clients:
        pass
    assert clients.history.outcomes() == {FINISHED: NUM_STREAMS}
