"""Deployments under Locust's load: updates, versions that do not start, nodes that end or freeze. Not one request fails."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.deployer import Deployer, load
from tests.integration.fleet_process import ROOT, Served, start_fleet
from tests.long import long

pytestmark = [
    pytest.mark.timeout(900),
    long("faults"),
]
LOAD_S = 15
WITHIN_S = 240.0
BIG_BYTES = 400 * 1024 * 1024
NUM_TRIES = 5


def redis_url(fleet: Served) -> str:
    return fleet.child("gateway").environ()["VLM_REDIS__URL"]


@contextmanager
def second_node(fleet: Served, folder: Path, **variables: str) -> Iterator[psutil.Process]:
    """A `vlm node` beside the one of `vlm serve`, as on another machine."""
    environment = {
        **os.environ,
        "VLM_REDIS_URL": redis_url(fleet),
        "VLM_DEPLOY__STORE": f"file://{folder / 'packages'}",
        "VLM_DEPLOY__CACHE_DIR": str(folder / "second-cache"),
        "VLM_DEPLOY__NODE_ID": "second",
        "VLM_ENGINE__MOCK__DECODE_S": "0.02",
        **variables,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "vlm", "node"], cwd=ROOT, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    found = psutil.Process(process.pid)
    try:
        yield found
    finally:
        for each in [*(found.children(recursive=True) if found.is_running() else []), found]:
            if each.is_running():
                each.kill()
        process.wait()


@pytest.fixture(scope="module")
def deployer(tmp_path_factory) -> Iterator[Deployer]:
    """With its own node's room for two instances, one of which runs."""
    folder = tmp_path_factory.mktemp("serve")
    fleet = start_fleet(folder, VLM_ENGINE__MOCK__DECODE_S="0.02", VLM_DEPLOY__CPU="2")
    deployer = Deployer(fleet, folder, within_s=WITHIN_S)
    try:
        deployed(deployer, 1, "--min-instances", "1")
        yield deployer
    finally:
        fleet.end()


@contextmanager
def locust(deployer: Deployer) -> Iterator[None]:
    """Locust's users ask, whole and streamed, until the block ends; every answer is checked."""
    stopping, faults, num_runs = threading.Event(), list[str](), 0

    def run() -> None:
        nonlocal num_runs
        while not stopping.is_set():
            done = subprocess.run(
                [sys.executable, "-m", "vlm", "loadtest", "--host", deployer.fleet.url, "--model",
                 "cap", "--profile", "text", "--users", "6", "--duration", str(LOAD_S), "--warmup", "0",
                 "--think-time", "0.2"],
                cwd=ROOT, capture_output=True, text=True, check=False,
            )  # fmt: skip
            num_runs += 1
            if done.returncode:
                faults.append(done.stdout[-3000:] + done.stderr[-3000:])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
    assert not faults, faults[0]
    assert num_runs


def deployed(deployer: Deployer, version: int, *more: str) -> str:
    done = deployer.deploy(version, *more)
    assert done.returncode == 0, done.stderr
    return deployer.active()


def test_updates_and_rollbacks_of_one_another(deployer: Deployer):
    """A, B, A in the middle of B's start, C; then back."""
    first = deployer.active()
    with locust(deployer):
        for version in (2, 1, 3):
            done = deployer.deploy(version, "--wait", "0", "--min-instances", "1")
            assert done.returncode == 0, done.stderr
        app = deployer.wait(lambda app: app["state"] == "active" and app["generation"] >= 3)
        assert app["active"]["digest"] != first
        back = deployer.vlm("rollback", "cap")
        assert back.returncode == 0, back.stderr


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--resources", "cpu=1,memory=20m"), "MB of memory, its limit is 20 MB"),
        (("--start-s", "0.1"), "not ready within 0.1 s"),
    ],
    ids=["ends", "hangs"],
)
def test_a_version_that_does_not_start_is_rolled_back(deployer: Deployer, more, says):
    old = deployer.active()
    with locust(deployer):
        done = deployer.deploy(10, *more)
        assert done.returncode == 5, done.stderr
        assert says in " ".join(done.stderr.split())
    assert deployer.active() == old


def test_a_node_that_is_killed_or_freezes(deployer: Deployer, tmp_path: Path):
    folder = deployer.folder
    with second_node(deployer.fleet, folder, VLM_DEPLOY__CPU="2") as node:
        done = deployer.vlm("scale", "cap", "--min", "3", "--max", "3")
        assert done.returncode == 0, done.stderr
        deployer.wait(
            lambda app: (
                [s["state"] for s in app["slots"]] == ["ready"] * 3
                and "second" in {s["node"] for s in app["slots"]}
            )
        )
        with locust(deployer):
            node.send_signal(signal.SIGSTOP)  # its instances go on; it is silent
            deployer.wait(lambda app: "second" not in {s["node"] for s in app["slots"]})
            node.send_signal(signal.SIGCONT)
            deployer.wait(
                lambda app: (
                    [s["state"] for s in app["slots"]] == ["ready"] * 3
                    and "second" in {s["node"] for s in app["slots"]}
                )
            )
            node.kill()  # and its instances with it
            deployer.wait(lambda app: "second" not in {s["node"] for s in app["slots"]})
    app = deployer.app()
    assert app["active"] is not None
    assert app["state"] == "active"
    done = deployer.vlm("scale", "cap", "--min", "1", "--max", "1")  # room for a next version
    assert done.returncode == 0, done.stderr
    deployer.wait(lambda app: [slot["state"] for slot in app["slots"]] == ["ready"])


def test_an_upload_that_is_killed_registers_nothing_and_the_next_goes_on(
    deployer: Deployer, tmp_path: Path
):
    before = deployer.app()["generation"]
    uploads = deployer.folder / "packages" / "uploads"
    package = tmp_path / "big"
    package.mkdir()
    (package / "config.json").write_text("{}")
    parts: list[Path] = []
    for number in range(NUM_TRIES):  # a machine that pauses may see it finished, and not begun
        write_weights(package, number)
        with deployer.begin(*deploy_of(package)) as process:
            while process.poll() is None and not parts_of(uploads):
                time.sleep(0.002)
            process.kill()
        if parts := parts_of(uploads):
            break
        before = deployer.app()["generation"]
    assert parts
    assert deployer.app()["generation"] == before
    done = deployer.vlm(*deploy_of(package))
    assert done.returncode == 0, done.stderr
    assert not any(path.exists() for path in parts)
    assert deployer.app()["generation"] == before + 1


def deploy_of(package: Path) -> list[str]:
    return ["deploy", "--name", "cap", "--application", str(package), "--set", "kind=mock"]


def write_weights(package: Path, number: int) -> None:
    """Large, and other bytes for each number."""
    with (package / "weights.safetensors").open("wb") as file:
        for place in range(BIG_BYTES >> 20):
            file.write((number << 16 | place).to_bytes(4, "big") * (1 << 18))


def parts_of(uploads: Path) -> list[Path]:
    """Those that have begun in earnest."""
    found = []
    for path in uploads.glob("*.part"):
        with suppress(FileNotFoundError):  # finished meanwhile
            found += [path] if path.stat().st_size > BIG_BYTES // 8 else []
    return found


def test_instances_follow_real_load_up_and_down(deployer: Deployer):
    """One request at a time and instance, so that six users wait."""
    slow = ("--max-instances", "2", "--idle-s", "4", "--set", "max_num_seqs=1")
    deployed(deployer, 20, *slow, "--set", "mock__decode_s=0.3")
    with locust(deployer):
        deployer.wait(lambda app: app["desired"] == 2)
    deployer.wait(lambda app: app["desired"] == 0 and not app["slots"])
    with locust(deployer):
        deployer.wait(lambda app: app["active"]["num_ready"] >= 1)


def test_a_canary_answers_under_load_and_is_promoted(deployer: Deployer):
    one = ("--min-instances", "1", "--max-instances", "1")  # room for the other version
    old = deployed(deployer, 30, *one)
    with load(deployer):
        begun = deployer.deploy(32, "--canary", "50%", *one)
        assert begun.returncode == 0, begun.stderr
        candidate = deployer.wait(lambda app: (app["candidate"] or {}).get("num_finished", 0) > 200)
        assert candidate["state"] == "canary"
        assert deployer.vlm("promote", "cap").returncode == 0
    assert deployer.active() != old
