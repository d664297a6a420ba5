"""A real llama-server on a tiny GGUF file, where `make test-engines` has built one."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from engines.upstream.server import free_port
from tests import factories_gguf
from tests.engines.upstream.build_llama_server import BINARY
from tests.waiting import wait_for

NUM_SLOTS, CONTEXT = 4, 512


def find_binary() -> str:
    """Skips the test where there is none."""
    binary = os.environ.get("LLAMA_SERVER", str(BINARY))
    if not Path(binary).is_file():
        pytest.skip("llama-server is not built: make test-engines")
    return binary


def write_model(file: Path) -> Path:
    model = factories_gguf.make_model("llama", max_position_embeddings=CONTEXT)
    factories_gguf.write_text(file, model, "llama")
    return file


@contextmanager
def run_llama_server(file: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Its address and process."""
    port = free_port()
    command = [
        find_binary(), "--model", str(file), "--host", "127.0.0.1", "--port", str(port), "--parallel",
        str(NUM_SLOTS), "--ctx-size", str(CONTEXT * NUM_SLOTS), "--threads", "1", "--no-ui",
    ]  # fmt: skip
    log = file.with_suffix(".log").open("wb")
    process = subprocess.Popen(command, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, file.with_suffix(".log").read_text()[-2000:]
        try:
            return httpx.get(f"{url}/health", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_for(is_ready)
        yield url, process
    finally:
        process.kill()
        process.wait()
        log.close()
