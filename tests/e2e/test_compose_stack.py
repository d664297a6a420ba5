"""The compose stack for real: it comes up, answers, scales, restarts under load and goes. Needs a docker engine."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from loadtest.client import AnswerError, ChatClient
from loadtest.pictures import noise_jpeg, to_data_url
from loadtest.scenarios import picture_part, text_part, to_body
from tests.e2e.compose_stack import IMAGE, ComposeStack, compose_command, docker, run_stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_WORKERS = 3
NUM_CLIENTS = 8
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


def ask(client: ChatClient, model: str, num_tokens: int = 8, *, stream: bool = True) -> int:
    content = [picture_part(to_data_url(noise_jpeg(4_000))), text_part("What is it?")]
    body = {**to_body(model, content, num_tokens, stream), "ignore_eos": True}
    return client.ask(body).num_tokens


class Load:
    """Clients that ask without a pause, and what became of their requests."""

    def __init__(self, url: str) -> None:
        self.num_answers = 0
        self.failures: list[Exception] = []
        self._url = url
        self._stop = threading.Event()
        self._lock = threading.Lock()

    def _run(self) -> None:
        with ChatClient(self._url) as client:
            while not self._stop.is_set():
                failure = self._ask_once(client)
                with self._lock:
                    self.num_answers += failure is None
                    self.failures += [failure] if failure else []

    def _ask_once(self, client: ChatClient) -> Exception | None:
        try:
            assert ask(client, "mock", 40) == 40
        except (AnswerError, AssertionError, OSError) as error:
            return error
        return None

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [pool.submit(self._run) for _ in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                self._stop.set()
            for client in clients:
                client.result()

    def wait_for_answers(self, count: int) -> None:
        """Return when so many more have come."""
        wanted = self.num_answers + count
        give_up_at = time.monotonic() + 60
        while self.num_answers < wanted and not self.failures:
            assert time.monotonic() < give_up_at
            time.sleep(0.05)


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
    load = Load(scaled.url)
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
    [gateway] = stack.containers("gateway")
    said = stack.logs(gateway)
    assert "gateway listens" in said
    assert "redis://" not in said
