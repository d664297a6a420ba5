"""The compose stack for real: it comes up, answers, scales, restarts under load and goes. Needs a docker engine."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from loadtest.client import ChatClient
from tests.e2e.compose_load import Load, ask
from tests.e2e.compose_stack import PROJECT, WITHIN_S, ComposeStack, docker, run_stack, succeeds
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_WORKERS = 3
IMAGE = "vlm-fleet:mock"
BASE_IMAGE = "python:3.11-slim"


@pytest.fixture(scope="module")
def stack() -> Iterator[ComposeStack]:
    with run_stack() as stack:
        yield stack


@pytest.fixture(scope="module")
def scaled(stack) -> ComposeStack:
    """The stack with several workers, which the gateway knows."""
    stack.up("--scale", f"worker={NUM_WORKERS}")
    wait_for(lambda: stack.num_workers() == NUM_WORKERS, WITHIN_S)
    return stack


@pytest.fixture(scope="module")
def watched(scaled) -> ComposeStack:
    """The same beside Prometheus."""
    scaled.up("--scale", f"worker={NUM_WORKERS}", "worker", "prometheus")
    return scaled


@pytest.mark.parametrize("stream", [False, True])
def test_stack_answers_a_question_about_an_image(stack, stream):
    with ChatClient(stack.url) as client:
        [model] = client.models()
        assert ask(client, model, stream=stream) == 8


def test_scaled_workers_share_the_load(scaled):
    with ThreadPoolExecutor(24) as pool:

        def ask_once(_: int) -> int:
            with ChatClient(scaled.url) as client:
                return ask(client, "mock", 60)

        assert list(pool.map(ask_once, range(96))) == [60] * 96
    claims = [scaled.claims(worker) for worker in scaled.containers("worker")]
    assert len(claims) == NUM_WORKERS
    assert min(claims) >= 0.1 * sum(claims), claims


def test_workers_restart_one_by_one_under_load_without_a_failed_request(scaled):
    load = Load(scaled.urls)
    with load.running():
        load.wait_for_answers(10)
        for worker in scaled.containers("worker"):
            docker("restart", "--time", "40", worker)
            assert scaled.inspect(worker)["State"]["Running"]
            wait_for(lambda: scaled.num_workers() == NUM_WORKERS, WITHIN_S)
            load.wait_for_answers(10)
    assert load.failures == []
    print(f"{load.num_answers} answers while {NUM_WORKERS} workers restarted")


def test_a_gateway_that_is_stopped_finishes_what_it_has_begun(scaled):
    [gateway] = scaled.containers("gateway")
    with ChatClient(scaled.url) as client, ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, client, "mock", 400)
        wait_for(lambda: scaled.num_open_requests() == 1, WITHIN_S)
        docker("stop", "--time", "40", gateway)
        assert answer.result() == 400
    assert scaled.inspect(gateway)["State"]["ExitCode"] == 0
    docker("start", gateway)
    wait_for(lambda: scaled.num_workers() == NUM_WORKERS, WITHIN_S)


def addresses(stack: ComposeStack, service: str, port: int) -> set[str]:
    """Where a service's containers are within the network that Prometheus is in."""
    networks = [
        stack.inspect(container)["NetworkSettings"]["Networks"]
        for container in stack.containers(service)
    ]
    return {f"{each[f'{PROJECT}_default']['IPAddress']}:{port}" for each in networks}


def scraped(url: str) -> set[str]:
    """What Prometheus finds up."""
    found = httpx.get(f"{url}/api/v1/targets").raise_for_status().json()["data"]["activeTargets"]
    return {target["labels"]["instance"] for target in found if target["health"] == "up"}


def test_prometheus_finds_every_process_up(watched):
    [prometheus] = watched.containers("prometheus")
    url = f"http://{docker('port', prometheus, '9090/tcp')}"
    expected = addresses(watched, "gateway", 8000) | addresses(watched, "worker", 8001)
    assert len(expected) == 1 + NUM_WORKERS
    wait_for(lambda: scraped(url) == expected, WITHIN_S)


def test_processes_have_no_rights_that_they_do_not_need(watched):
    names = set()
    for container in watched.containers():
        found = watched.inspect(container)
        name = found["Config"]["Labels"]["com.docker.compose.service"]
        names.add(name)
        assert docker("exec", container, "id", "-u") != "0", name
        assert found["HostConfig"]["ReadonlyRootfs"], name
        assert found["HostConfig"]["CapDrop"] == ["ALL"], name
        assert not found["HostConfig"]["CapAdd"], name
        assert "no-new-privileges:true" in found["HostConfig"]["SecurityOpt"], name
    assert names == {"redis", "gateway", "worker", "prometheus"}


def test_redis_lets_nobody_in_without_a_name(stack):
    [redis] = stack.containers("redis")
    said = docker("exec", redis, "redis-cli", "keys", "*")
    assert said.startswith("NOAUTH")


def test_the_image_is_small_and_brings_no_torch(stack):
    code = "from importlib.metadata import distributions as d; print(*(x.name for x in d()))"
    names = docker("run", "--rm", "--entrypoint", "python", IMAGE, "-c", code).split()
    assert "starlette" in names
    assert not {"torch", "transformers", "numpy"} & set(names)
    if not succeeds("docker", "image", "inspect", BASE_IMAGE):
        docker("pull", BASE_IMAGE)  # a builder may keep what it pulls to itself
    sizes = [int(docker("inspect", "-f", "{{.Size}}", name)) for name in (IMAGE, BASE_IMAGE)]
    added = sizes[0] - sizes[1]
    print(f"{added / 1e6:.0f} MB over the base image")
    assert added < 250e6


def test_the_image_brings_what_signs_and_isolates(stack):
    code = (
        "ssh-keygen -q -t ed25519 -N '' -f /tmp/key && echo x | ssh-keygen -Y sign -f /tmp/key -n n"
    )
    said = docker("run", "--rm", "--entrypoint", "sh", IMAGE, "-c", f"{code} && bwrap --version")
    assert "BEGIN SSH SIGNATURE" in said
    assert "bubblewrap" in said


def test_the_logs_tell_no_secret(stack):
    [gateway, *_] = stack.containers("gateway")
    said = stack.logs(gateway)
    assert "gateway listens" in said
    assert "redis://" not in said
