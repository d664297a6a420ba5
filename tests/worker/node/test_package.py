"""A worker process that fetches its package itself."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.packages.deployments import version_name
from shared.protocol import ModelCard
from shared.queue.registry import Registry
from tests.waiting import until
from tests.worker.node.test_install import FILES, add


@contextmanager
def started(folder: Path, package: str, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    environment = {
        "VLM_REDIS__URL": "redis://127.0.0.1:1",
        "VLM_DEPLOY__PACKAGE": package,
        "VLM_DEPLOY__STORE": f"file://{folder}/store",
        "VLM_DEPLOY__CACHE_DIR": f"{folder}/cache",
        **variables,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "vlm", "worker"], cwd=folder, text=True, stderr=subprocess.PIPE,
        env={**os.environ, **environment},
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_a_worker_serves_the_version_of_its_package_until_it_is_stopped(
    store, tmp_path, redis, redis_server, redis_prefix
):
    package = add(store, FILES)
    where = {"VLM_REDIS__URL": redis_server, "VLM_REDIS__KEY_PREFIX": redis_prefix}
    (tmp_path / ".env").write_text(f"VLM_DEPLOY__PACKAGE=cap@{package}")
    registry = Registry(redis, redis_prefix)
    with started(tmp_path, f"cap@{package}", **where) as process:

        async def card() -> ModelCard | None:
            assert process.poll() is None, process.stderr and process.stderr.read()
            return next((worker.card for worker in await registry.workers()), None)

        found = await until(card)
        assert (found.name, found.package) == (version_name("cap", package), f"cap@{package}")
        process.terminate()
        assert process.wait(60) == 0
    assert await registry.workers() == []
    await registry.close()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"VLM_DEPLOY__PACKAGE": "sha256:" + 64 * "0"}, "VLM_DEPLOY__PACKAGE: write NAME@sha256:"),
        ({"VLM_DEPLOY__PACKAGE": "cap@sha256:" + 64 * "0"}, "has no package"),
        ({"VLM_DEPLOY__ENVIRONMENT": '{"secrets":{"A":"t"}}'}, "has no secret t"),
    ],
)
def test_an_unavailable_package_ends_a_worker_with_one_line(store, tmp_path, variables, says):
    with started(tmp_path, f"cap@{add(store, FILES)}", **variables) as process:
        _, errors = process.communicate(timeout=200)
    assert process.returncode == os.EX_CONFIG
    [line] = errors.splitlines()
    assert says in line
