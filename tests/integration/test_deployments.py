"""Deployments by the command line on real processes, under load of which no request may fail."""

import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from redis import Redis

from tests.integration.deployer import CHAT, WITHIN_S, Deployer, load
from tests.integration.fleet_process import start_fleet
from tests.waiting import wait_for

LONG = {
    "model": "cap", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000,
    "ignore_eos": True,
}  # fmt: skip


@contextmanager
def streaming(deployer: Deployer, key: str = "none") -> Iterator[Iterator[str]]:
    """Yields the remaining chunks of a long stream after its first token."""
    headers = {"authorization": f"Bearer {key}"}
    body = LONG | {"stream": True}
    with (
        deployer.fleet.client() as client,
        client.stream("POST", CHAT, json=body, headers=headers) as answer,
    ):
        lines = answer.iter_lines()
        next(line for line in lines if re.search(r'"content":"[^"]', line))
        yield lines


@pytest.fixture(scope="module")
def deployer(tmp_path_factory) -> Iterator[Deployer]:
    """A fleet whose node keeps only running packages. The last test ends it."""
    folder = tmp_path_factory.mktemp("serve")
    with start_fleet(
        folder,
        VLM_DEPLOY__CACHE_DIR=str(folder / "cache"),
        VLM_DEPLOY__MAX_CACHE_BYTES="1",
        VLM_ENGINE__MOCK__DECODE_S="0.02",
    ) as fleet:
        yield Deployer(fleet, folder)


def test_an_update_a_bad_version_and_a_rollback_under_load(deployer: Deployer):
    first = deployer.deploy(1, "--resources", "cpu=1,memory=1g")
    assert first.returncode == 0, first.stderr
    assert "2 of 2 blobs uploaded" in first.stderr
    old = deployer.active()
    with load(deployer) as running:
        second = deployer.deploy(2)
        assert second.returncode == 0, second.stderr
        assert "1 of 2 blobs uploaded" in second.stderr  # the other blob is already there
        new = deployer.active()
        bad = deployer.deploy(3, "--resources", "cpu=1,memory=20m")
        assert bad.returncode == 5
        said = " ".join(bad.stderr.split())
        assert "MB of memory, its limit is 20 MB: deploy it with --resources memory=" in said
        assert deployer.active() == new
        back = deployer.vlm("rollback", "cap")
        assert back.returncode == 0, back.stderr
        assert deployer.active() == old
        deployer.wait(lambda app: {slot["digest"] for slot in app["slots"]} == {old})
    assert set(running.packages) == {f"cap@{old}", f"cap@{new}"}
    assert old != new
    kept = {
        path.name
        for path in (deployer.folder / "cache" / "packages").glob("[!.]*")
        if path.is_dir()
    }
    assert old.removeprefix("sha256:") in kept
    assert len(kept) == 2  # the running package, and the last one that was replaced


def test_a_killed_instance_is_replaced_and_its_requests_continue(deployer: Deployer):
    with load(deployer):
        [instance] = deployer.instances()
        instance.kill()
        deployer.wait(
            lambda app: [s["state"] for s in app["slots"]] == ["ready"]
            and any("SIGKILL" in event["text"] for event in app["events"])
        )  # fmt: skip


def test_deployments_lost_by_redis_are_restored_from_the_store(deployer: Deployer):
    [before] = deployer.instances()
    with load(deployer):
        [socket] = {
            process.environ()["VLM_REDIS__URL"] for process in deployer.fleet.family()
            if "gateway" in process.cmdline()
        }  # fmt: skip
        with Redis.from_url(socket) as redis:
            assert redis.delete("vlm:apps")
            wait_for(lambda: redis.exists("vlm:apps"), WITHIN_S)
        deployer.wait(lambda app: [s["state"] for s in app["slots"]] == ["ready"])
    assert deployer.instances() == [before]


def test_a_deployment_scaled_to_zero_starts_with_the_first_request(deployer: Deployer):
    again = deployer.deploy(1, "--idle-s", "1")
    assert again.returncode == 0, again.stderr
    deployer.wait(lambda app: not app["slots"])
    with load(deployer, num_clients=1) as running:
        wait_for(lambda: running.packages, WITHIN_S)


def test_an_undeployed_application_is_not_found(deployer: Deployer):
    gone = deployer.vlm("undeploy", "cap")
    assert gone.returncode == 0, gone.stderr
    wait_for(lambda: not deployer.instances(), WITHIN_S)
    with deployer.fleet.client() as client:
        wait_for(lambda: client.post(CHAT, json=LONG).status_code == 404, WITHIN_S)


def test_a_deployment_that_fits_on_no_node_fails_after_its_start_time(deployer: Deployer):
    assert deployer.deploy(1).returncode == 0
    old = deployer.active()
    began_at = time.monotonic()
    done = deployer.deploy(9, "--resources", "gpu=8", "--start-s", "2", "--timeout", "100")
    assert done.returncode == 5
    assert time.monotonic() - began_at < 60
    assert "did not start within 2 s: no node has room" in " ".join(done.stderr.split())
    begun = deployer.deploy(10, "--resources", "gpu=8", "--no-wait")
    assert begun.returncode == 0, begun.stderr
    deployer.vlm("rollback", "cap", "--wait", "0")
    deployer.wait(lambda app: app["state"] == "active")
    assert deployer.active() == old


def test_streams_of_a_retiring_version_that_cannot_restart_end_at_once(deployer: Deployer):
    first = deployer.deploy(7, "--min-instances", "1", "--max-instances", "1", "--retry-limit", "0")
    assert first.returncode == 0, first.stderr
    old = deployer.active()
    deployer.wait(lambda app: {slot["digest"] for slot in app["slots"]} == {old})
    [instance] = deployer.instances()
    answers: list[httpx.Response] = []
    with deployer.fleet.client() as client, streaming(deployer) as lines:
        whole = threading.Thread(target=lambda: answers.append(client.post(CHAT, json=LONG)))
        whole.start()
        second = deployer.deploy(8, "--min-instances", "1")
        assert second.returncode == 0, second.stderr
        assert deployer.active() != old
        instance.kill()
        killed_at = time.monotonic()
        last = [line for line in lines if line][-1]
        assert time.monotonic() - killed_at < 10
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["code"], error["should_retry"]) == ("worker_lost", True)
        whole.join()
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "worker_lost"
    assert answers[0].headers["x-should-retry"] == "true"


def test_a_version_that_crashes_for_two_tenants_is_rolled_back(tmp_path):
    keys = [name * 40 for name in "ab"]
    slow = {"VLM_ENGINE__MOCK__DECODE_S": "0.05"}
    with start_fleet(tmp_path, VLM_GATEWAY__API_KEYS=",".join(keys), **slow) as fleet:
        deployer = Deployer(fleet, tmp_path)
        for version, more in ((1, ()), (2, ("--retry-limit", "0"))):
            done = deployer.deploy(version, "--min-instances", "1", *more)
            assert done.returncode == 0, done.stderr
        new = deployer.active()
        deployer.wait(lambda app: {slot["digest"] for slot in app["slots"]} == {new})
        for key in keys:
            assert deployer.active() == new
            [instance] = deployer.instances()
            slots = {slot["id"] for slot in deployer.app()["slots"]}
            with streaming(deployer, key):
                instance.kill()
                deployer.wait(lambda app, old=slots: old.isdisjoint(s["id"] for s in app["slots"]))
            deployer.wait(lambda app: any(slot["state"] == "ready" for slot in app["slots"]))
        app = deployer.wait(lambda app: app["active"]["digest"] != new)
        assert [each["cause"] for each in app["generations"]][-2:] == ["deploy", "rollback"]
        shown = " ".join(deployer.vlm("app", "cap").stdout.split())
        assert re.search(r"failed \d times", shown)


def test_a_second_ctrl_c_waits_for_no_instance(deployer: Deployer):
    fleet, instances = deployer.fleet, deployer.instances()
    assert instances
    with streaming(deployer):
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.process.stderr is not None
        assert any(line.startswith("stopping") for line in fleet.process.stderr)
        fleet.process.send_signal(signal.SIGINT)
        fleet.process.wait(10)  # calls of a stopped gateway would run for 15 s
    assert not any(instance.is_running() for instance in instances)
