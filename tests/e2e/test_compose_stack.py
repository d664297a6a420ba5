"""The compose stack for real: it comes up, answers, scales, restarts under load and goes. Needs a docker engine."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from loadtest.client import ChatClient
from tests.e2e.compose_load import Load, ask
from tests.e2e.compose_stack import IMAGE, ComposeStack, compose_command, docker, run_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_WORKERS = 3
BASE_IMAGE = "python:3.11-slim"


@pytest.fixture(scope="module")
def stack() -> Iterator[ComposeStack]:
    command = compose_command()
    if not command:
        pytest.skip("no docker engine with compose runs here")
    with run_stack(command) as stack:
        yield stack


@pytest.fixture(scope="module")
def scaled(stack) -> ComposeStack:
    """The stack with several workers, which the gateway knows."""
    stack.up("--scale", f"worker={NUM_WORKERS}")
    stack.wait_until(lambda: stack.num_workers() == NUM_WORKERS)
    return stack


@pytest.mark.parametrize("stream", [False, True])
def test_stack_answers_a_question_about_a_picture(stack, stream):
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
            scaled.wait_until(lambda: scaled.num_workers() == NUM_WORKERS)
            load.wait_for_answers(10)
    assert load.failures == []
    print(f"{load.num_answers} answers while {NUM_WORKERS} workers restarted")


def test_a_gateway_that_is_stopped_finishes_what_it_has_begun(scaled):
    [gateway] = scaled.containers("gateway")
    with ChatClient(scaled.url) as client, ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, client, "mock", 400)
        scaled.wait_until(lambda: scaled.num_open_requests() == 1)
        docker("stop", "--time", "40", gateway)
        assert answer.result() == 400
    assert scaled.inspect(gateway)["State"]["ExitCode"] == 0
    docker("start", gateway)
    scaled.wait_until(lambda: scaled.num_workers() == NUM_WORKERS)


def test_processes_have_no_rights_that_they_do_not_need(stack):
    for container in stack.containers():
        found = stack.inspect(container)
        name = found["Config"]["Labels"]["com.docker.compose.service"]
        assert docker("exec", container, "id", "-u") != "0", name
        assert found["HostConfig"]["ReadonlyRootfs"], name
        assert found["HostConfig"]["CapDrop"] == ["ALL"], name
        assert not found["HostConfig"]["CapAdd"], name
        assert "no-new-privileges:true" in found["HostConfig"]["SecurityOpt"], name


def test_redis_lets_nobody_in_without_a_name(stack):
    [redis] = stack.containers("redis")
    said = docker("exec", redis, "redis-cli", "keys", "*")
    assert said.startswith("NOAUTH")


def test_the_image_is_small_and_brings_no_torch(stack):
    code = "from importlib.metadata import distributions as d; print(*(x.name for x in d()))"
    names = docker("run", "--rm", "--entrypoint", "python", IMAGE, "-c", code).split()
    assert "fastapi" in names
    assert not {"torch", "transformers", "numpy"} & set(names)
    sizes = [int(docker("inspect", "-f", "{{.Size}}", name)) for name in (IMAGE, BASE_IMAGE)]
    added = sizes[0] - sizes[1]
    print(f"{added / 1e6:.0f} MB over the base image")
    assert added < 200e6


def test_the_logs_tell_no_secret(stack):
    [gateway, *_] = stack.containers("gateway")
    said = stack.logs(gateway)
    assert "gateway listens" in said
    assert "redis://" not in said
