"""The running compose stack: start, answers, scaling and stop. Needs a Docker engine."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from loadtest.albums import NumberedUrls, noise_jpeg
from loadtest.client import ChatClient
from loadtest.scenarios import image_part, text_part, to_chat_body, user_message
from tests.e2e.compose_stack import WITHIN_S, ComposeStack, docker, run_stack, succeeds
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
    """The stack with several workers that the gateway lists."""
    stack.up("--scale", f"worker={NUM_WORKERS}")
    wait_for(lambda: stack.num_workers() == NUM_WORKERS, WITHIN_S)
    return stack


def ask(client: ChatClient, num_tokens: int = 8, *, stream: bool = True) -> int:
    """Asks about an image; returns the number of tokens of the answer."""
    image = image_part(NumberedUrls(noise_jpeg(4_000)).url(0))
    messages = [user_message([image, text_part("What is it?")])]
    body = {**to_chat_body("mock", messages, num_tokens, stream), "ignore_eos": True}
    return client.ask(body).num_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_stack_answers_a_question_about_an_image(stack, stream):
    with ChatClient(stack.url) as client:
        assert client.models() == ["mock"]
        assert ask(client, stream=stream) == 8


def test_a_stopped_gateway_finishes_its_requests(scaled):
    [gateway] = scaled.containers("gateway")
    with ChatClient(scaled.url) as client, ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, client, 400)
        wait_for(lambda: scaled.num_open_requests() == 1, WITHIN_S)
        docker("stop", "--time", "40", gateway)
        assert answer.result() == 400
    assert scaled.inspect(gateway)["State"]["ExitCode"] == 0
    docker("start", gateway)
    wait_for(lambda: scaled.num_workers() == NUM_WORKERS, WITHIN_S)


def test_no_process_is_root_redis_needs_a_user_and_logs_have_no_secret(scaled):
    assert not {docker("exec", each, "id", "-u") for each in scaled.containers()} & {"0"}
    [redis] = scaled.containers("redis")
    assert docker("exec", redis, "redis-cli", "keys", "*").startswith("NOAUTH")
    [gateway, *_] = scaled.containers("gateway")
    said = scaled.logs(gateway)
    assert "gateway listens" in said
    assert "redis://" not in said


def test_the_image_is_small_with_ssh_keygen_and_bubblewrap_without_torch(stack):
    code = "from importlib.metadata import distributions as d; print(*(x.name for x in d()))"
    names = docker("run", "--rm", "--entrypoint", "python", IMAGE, "-c", code).split()
    assert "starlette" in names
    assert not {"torch", "transformers", "numpy"} & set(names)
    if not succeeds("docker", "image", "inspect", BASE_IMAGE):
        docker("pull", BASE_IMAGE)  # a builder can keep pulled images in its own cache
    sizes = [int(docker("inspect", "-f", "{{.Size}}", name)) for name in (IMAGE, BASE_IMAGE)]
    added = sizes[0] - sizes[1]
    print(f"{added / 1e6:.0f} MB over the base image")
    assert added < 250e6
    code = (
        "ssh-keygen -q -t ed25519 -N '' -f /tmp/key && echo x | ssh-keygen -Y sign -f /tmp/key -n n"
    )
    said = docker("run", "--rm", "--entrypoint", "sh", IMAGE, "-c", f"{code} && bwrap --version")
    assert "BEGIN SSH SIGNATURE" in said
    assert "bubblewrap" in said
