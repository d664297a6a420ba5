"""Build llama-server from the sdist of llama-cpp-python into `.cache/llama-server`: `make test-engines`.

It takes about 20 minutes on two cores and needs a C++ compiler; nothing is fetched but packages of PyPI.
"""

import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "0.3.36"
FOLDER = Path(__file__).parents[3] / ".cache" / "llama-server"
BINARY = FOLDER / "build" / "bin" / "llama-server"
_OPTIONS = (
    "CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=OFF", "GGML_NATIVE=OFF", "GGML_AVX2=ON", "LLAMA_CURL=OFF",
    "LLAMA_BUILD_SERVER=ON", "LLAMA_BUILD_UI=OFF", "LLAMA_USE_PREBUILT_UI=OFF", "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
)  # fmt: skip


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
