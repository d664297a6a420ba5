"""The environment of the peers: llama.cpp built from its published package, beside what we are installed with.

Our own environment is not touched: the peers have one of their own, which also sees ours, for the checkpoint's files
and torch. A build that was cut goes on where it stopped.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

LLAMA_CPP_VERSION = "0.3.36"
_TOOLS = ("gguf==0.19.0", "scikit-build-core==1.1.2", "cmake", "ninja")


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
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
    marker = _marker(folder)
    if not marker.exists():
        _pip(python, "install", *_TOOLS)
        _build_llama_cpp(python, folder)
        _show_our_packages(environment)
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
