"""A deployment under load, long form (`make faults`): no request fails when a node ends or freezes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.deployer import Deployer, load
from tests.integration.fleet_process import ROOT, start_fleet
from tests.long import long

pytestmark = [pytest.mark.timeout(900), long("faults")]
WITHIN_S = 240.0


@pytest.fixture
def deployer(tmp_path: Path) -> Iterator[Deployer]:
    """A fleet whose node has room for two instances, of which one runs."""
    options = {"VLM_ENGINE__MOCK__DECODE_S": "0.02", "VLM_DEPLOY__CPU": "2"}
    with start_fleet(tmp_path, **options) as fleet:
        deployer = Deployer(fleet, tmp_path, within_s=WITHIN_S)
        done = deployer.deploy(1, "--min-instances", "1")
        assert done.returncode == 0, done.stderr
        yield deployer


@pytest.fixture
def node(deployer: Deployer) -> Iterator[psutil.Process]:
    """A `vlm node` beside the node of `vlm serve`, as on another machine."""
    environment = {
        **os.environ,
        "VLM_REDIS_URL": deployer.fleet.child("gateway").environ()["VLM_REDIS__URL"],
        "VLM_DEPLOY__STORE": f"file://{deployer.folder / 'packages'}",
        "VLM_DEPLOY__CACHE_DIR": str(deployer.folder / "second-cache"),
        "VLM_DEPLOY__NODE_ID": "second",
        "VLM_DEPLOY__CPU": "2",
        "VLM_ENGINE__MOCK__DECODE_S": "0.02",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "vlm", "node"], cwd=ROOT, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    found = psutil.Process(process.pid)
    yield found
    for each in [*(found.children(recursive=True) if found.is_running() else []), found]:
        if each.is_running():
            each.kill()
    process.wait()


def test_no_request_fails_when_a_node_is_killed_or_freezes(
    deployer: Deployer, node: psutil.Process
):
    def has_second(app: dict) -> bool:
        return "second" in {slot["node"] for slot in app["slots"]}

    def is_whole(app: dict) -> bool:
        return [s["state"] for s in app["slots"]] == ["ready"] * 3 and has_second(app)

    done = deployer.vlm("scale", "cap", "--min", "3", "--max", "3")
    assert done.returncode == 0, done.stderr
    deployer.wait(is_whole)
    with load(deployer):
        node.send_signal(signal.SIGSTOP)  # its instances continue, but the node sends nothing
        deployer.wait(lambda app: not has_second(app))
        node.send_signal(signal.SIGCONT)
        deployer.wait(is_whole)
        node.kill()  # its instances end too
        deployer.wait(lambda app: not has_second(app))
    app = deployer.app()
    assert app["active"] is not None
    assert app["state"] == "active"
