"""The environments of the peers: llama.cpp built from its published package, and engines of embeddings.

Our own environment is not touched. That of llama.cpp also sees ours, for the checkpoint's files and torch. A build that was
cut goes on where it stopped.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Callable
from pathlib import Path

LLAMA_CPP_VERSION = "0.3.36"
_TOOLS = ("gguf==0.19.0", "scikit-build-core==1.1.2", "cmake", "ninja")
#: Peers of the embedding engine, all with one torch. Infinity's last release knows older transformers.
_EMBEDDERS = {
    "sentence-transformers": ("sentence-transformers==6.2.0", "transformers==5.23.0", "torch==2.13.0"),
    "infinity": ("infinity-emb[torch]==0.0.78", "transformers==4.57.6", "torch==2.13.0"),
}  # fmt: skip


def is_installed(folder: Path) -> bool:
    """Whether llama.cpp is there already."""
    return _marker(folder).exists()


def _marker(folder: Path) -> Path:
    return folder / "venv" / f"llama-cpp-python-{LLAMA_CPP_VERSION}"


def peers_python(folder: Path) -> Path:
    """The interpreter in which llama.cpp is installed; installs what is missing, which takes minutes.

    Raises: subprocess.CalledProcessError, OSError.
    """
    environment = folder / "venv"

    def install(python: Path) -> None:
        _pip(python, "install", *_TOOLS)
        _build_llama_cpp(python, folder)
        _show_our_packages(environment)

    return _python_of(environment, _marker(folder), install)


def embedder_python(folder: Path, peer: str) -> Path:
    """The interpreter of an embedding engine; installs it at first use. Raises: as `peers_python`."""
    environment = folder / peer
    packages = _EMBEDDERS[peer]
    return _python_of(
        environment, environment / "complete", lambda python: _pip(python, "install", *packages)
    )


def _python_of(environment: Path, marker: Path, install: Callable[[Path], None]) -> Path:
    python = environment / "bin" / "python"
    if not marker.exists():
        if not python.exists():
            venv.create(environment, with_pip=True)
        install(python)
        marker.touch()
    return python


def _build_llama_cpp(python: Path, folder: Path) -> None:
    """For this machine's own instructions, as its users do."""
    name = f"llama_cpp_python-{LLAMA_CPP_VERSION}"
    if not (folder / name / "pyproject.toml").exists():
        _pip(
            python,
            *("download", "--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-python"),
            *("--dest", str(folder), f"llama-cpp-python=={LLAMA_CPP_VERSION}"),
        )
        with tarfile.open(folder / f"{name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    build = f"build-dir={folder.absolute() / 'build'}"
    _pip(python, "install", "--no-build-isolation", "-C", build, str(folder / name))


def _show_our_packages(environment: Path) -> None:
    """Let the environment see ours, behind its own."""
    packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
    line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (Path(packages) / "ours.pth").write_text(line)


def _pip(python: Path, *arguments: str) -> None:
    tools = f"{python.parent.absolute()}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": tools, "CMAKE_ARGS": "-DGGML_NATIVE=ON"}
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True, env=variables, stdout=sys.stderr)
