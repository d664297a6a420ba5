"""A real llama-server on a tiny GGUF file. `make test-engines` builds it from the sdist of llama-cpp-python.

The build takes about 20 minutes on two cores and needs a C++ compiler; only packages of PyPI are downloaded.
"""

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engines.upstream.server import free_port
from tests import factories_gguf
from tests.engines.upstream.serving import wait_until_healthy
from tests.waiting import WITHIN_S

VERSION = "0.3.36"
FOLDER = Path(__file__).parents[3] / ".cache" / "llama-server"
BINARY = FOLDER / "build" / "bin" / "llama-server"
_OPTIONS = (
    "CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "GGML_NATIVE=OFF", "GGML_AVX2=ON", "LLAMA_CURL=OFF",
    "LLAMA_BUILD_SERVER=ON", "LLAMA_BUILD_UI=OFF", "LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
)  # fmt: skip
NUM_SLOTS, CONTEXT = 4, 512


def find_binary() -> str:
    """Returns the path of the server; skips the test if it is not built."""
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
    """Runs a server; yields its URL and process."""
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


def main() -> None:
    if BINARY.is_file():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    tools = FOLDER / "tools"
    subprocess.run([*pip, "install", "--target", tools, "cmake", "ninja"], check=True)
    name = "llama-cpp-python"
    download = [*pip, "download", "--no-deps", "--no-binary", name, f"{name}=={VERSION}"]
    subprocess.run([*download, "--dest", FOLDER], check=True)
    with tarfile.open(FOLDER / f"llama_cpp_python-{VERSION}.tar.gz") as archive:
        archive.extractall(FOLDER, filter="data")
    source = FOLDER / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    cmake, ninja = tools / "bin" / "cmake", tools / "bin" / "ninja"
    environment = {"PYTHONPATH": str(tools), "PATH": "/usr/local/bin:/usr/bin:/bin"}
    configure = [cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-S", source]
    configure += ["-B", FOLDER / "build", *(f"-D{option}" for option in _OPTIONS)]
    subprocess.run(configure, check=True, env=environment)
    build = [cmake, "--build", FOLDER / "build", "--target", "llama-server", "-j2"]
    subprocess.run(build, check=True, env=environment)


if __name__ == "__main__":
    main()
