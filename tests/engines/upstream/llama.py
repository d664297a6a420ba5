"""A real llama-server on a tiny GGUF file, where `make test-engines` has built one."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.upstream.server import free_port
from tests import factories_gguf
from tests.engines.upstream.build_llama_server import BINARY
from tests.engines.upstream.serving import wait_until_healthy
from tests.waiting import WITHIN_S

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

    def check() -> None:
        assert process.poll() is None, file.with_suffix(".log").read_text()[-2000:]

    try:
        wait_until_healthy(f"{url}/health", check, WITHIN_S)
        yield url, process
    finally:
        process.kill()
        process.wait()
        log.close()
