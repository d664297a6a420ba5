"""The compose stack of `make up` with the built-in model: kernels are compiled once, and traces are exported.

On demand, because torch is large: `COMPOSE_TORCH=1 make compose-test`. `TORCH_ARGS` are pip's options for torch.
"""

import os
import re
from collections.abc import Iterator

import httpx
import pytest

from loadtest.albums import to_png_url
from loadtest.client import ChatClient
from loadtest.fleet import ROOT, free_port
from loadtest.scenarios import image_part, text_part, to_chat_body, user_message
from tests.e2e.compose_stack import WITHIN_S, ComposeStack, docker, run_stack
from tests.integration.fleet_process import SAMPLE, is_ready
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif("COMPOSE_TORCH" not in os.environ, reason="on demand: COMPOSE_TORCH=1"),
]


@pytest.fixture(scope="module")
def stack() -> Iterator[ComposeStack]:
    with run_stack(files=(), VLM_TRACES__EXPORT="otlp") as stack:
        yield stack


def question() -> dict:
    content = [image_part(to_png_url(SAMPLE.read_bytes())), text_part("How many shapes are there?")]
    return {**to_chat_body("shapes", [user_message(content)], 8, stream=False), "temperature": 0}


def test_the_built_in_model_sees_the_sample_and_the_answer_names_its_trace(stack):
    answer = httpx.post(f"{stack.url}/v1/chat/completions", json=question(), timeout=60)
    assert answer.json()["choices"][0]["message"]["content"].strip() == "3"
    flags = int(answer.headers["traceparent"].rpartition("-")[2], 16)
    assert flags & 1, "sampled"


def test_kernels_are_compiled_once_for_all_workers(stack):
    [first] = stack.containers("worker")
    said = stack.logs(first)
    assert "compiled CPU kernels in" in said
    [operators] = re.findall("operators on cpu: (.*)", said)
    assert {"linear_float cpu", "linear_int8 cpu", "paged_attention cpu"} <= set(
        operators.split(" (")[0].split(", ")
    )

    stack.up("--scale", "worker=2")
    [second] = set(stack.containers("worker")) - {first}
    said = stack.logs(second)
    assert "compiled CPU kernels" not in said
    assert "linear_int8 cpu" in said


def test_triton_finds_a_compiler_for_launchers(stack):
    [worker, *_] = stack.containers("worker")
    headers = "$(python -c 'import sysconfig; print(sysconfig.get_path(\"include\"))')"
    command = f"mkdir -p $TRITON_CACHE_DIR && gcc -fsyntax-only -I {headers} -include Python.h -x c /dev/null"
    docker("exec", worker, "sh", "-c", command)


def test_the_docker_run_of_the_readme_serves(stack):
    """Runs the image that the stack has built."""
    [line] = re.findall(
        r"&& docker (run .* vlm-fleet:cpu .*)$", (ROOT / "README.md").read_text(), re.M
    )
    port = free_port()
    container = docker(
        *line.replace(":8000:", f":{port}:").replace("run ", "run --detach ", 1).split()
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: is_ready(url), WITHIN_S)
        with ChatClient(url) as client:
            assert client.ask(question()).text == "3"
    finally:
        docker("stop", "--time", "40", container)
