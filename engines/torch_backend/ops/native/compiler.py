"""Compiles C++ sources to a shared library for a CPU level, in the user's cache folder.

The file is named by its level and the hash of sources, flags and compiler. A lock lets only one of the workers that
start together compile it. It is written under a temporary name and renamed, so that no worker loads a partial file. It
ends with a hash of its content, so that a file damaged by a power loss is compiled again instead of crashing workers.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engines.torch_backend.ops.cpu_level import CpuLevel

logger = logging.getLogger(__name__)

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-fno-math-errno", "-fno-trapping-math")  # fmt: skip
_TIMEOUT_S = 900  # a compilation takes minutes on a busy machine
_SEAL_BYTES = hashlib.sha256().digest_size


class CannotCompile(Exception):
    """The compiler is missing or failed, or the cache folder cannot be used. The message has the reason."""


def compile_library(directory: Path, level: CpuLevel, cache: Path | None = None) -> Path:
    """The library of all sources under a folder, compiled unless it is cached. Raises: CannotCompile."""
    if level.compiler_flags is None:
        raise CannotCompile("this processor has no supported instruction set")
    compiler = _find_compiler()
    sources, headers = (sorted(directory.rglob(f"*.{kind}")) for kind in ("cpp", "h"))
    flags = [*_FLAGS, *level.compiler_flags]
    name = f"{level.name}-{_fingerprint(compiler, flags, directory, [*sources, *headers])}"
    folders = [f"-I{folder}" for folder in sorted({header.parent for header in headers})]
    try:
        folder = cache or _cache_folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_private(folder)
        library = folder / f"{name}.so"
        if not _is_whole(library):
            with open(folder / f"{name}.lock", "w", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not _is_whole(library):  # else another process has compiled it
                    _compile([compiler, *flags, *folders], sources, library)
    except OSError as error:
        raise CannotCompile(f"cannot write compiled kernels; set XDG_CACHE_HOME: {error}") from None
    return library


def _find_compiler() -> str:
    names = [name for name in (os.environ.get("CXX"), *_COMPILERS) if name]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise CannotCompile(f"no C++ compiler; install one of {', '.join(names)}, or set CXX")
    return found


def _cache_folder() -> Path:
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # a user without a home directory
        raise CannotCompile(f"no cache folder; set XDG_CACHE_HOME: {error}") from None
    return Path(base) / "vlm-fleet" / "kernels"


def _check_private(folder: Path) -> None:
    """Raises: CannotCompile if other users can write to the folder, whose content is executed."""
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise CannotCompile(
            f"other users can write to {folder}; set XDG_CACHE_HOME to another folder"
        )


def _fingerprint(compiler: str, flags: list[str], directory: Path, files: list[Path]) -> str:
    version = _run([compiler, "--version"])
    parts = [compiler, version, " ".join(flags)]
    parts += [
        f"{file.relative_to(directory)}\n{file.read_text(encoding='utf-8')}" for file in files
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _is_whole(library: Path) -> bool:
    """Whether the file exists and ends with the hash of its content."""
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return False
    body, seal = content[:-_SEAL_BYTES], content[-_SEAL_BYTES:]
    return hashlib.sha256(body).digest() == seal


def _compile(command: list[str], sources: list[Path], library: Path) -> None:
    """Compile all sources in parallel, then link."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = [Path(scratch) / f"{place}.o" for place in range(len(sources))]
        commands = [
            [*command, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        output = Path(scratch) / library.name
        _run([*command, "-shared", *map(str, objects), "-o", str(output)])
        body = output.read_bytes()
        output.write_bytes(body + hashlib.sha256(body).digest())  # loaders ignore trailing bytes
        output.replace(library)
    logger.info("compiled CPU kernels in %.1f s: %s", time.perf_counter() - started, library)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        return done.stdout
    except subprocess.CalledProcessError as error:
        raise CannotCompile(f"{command[0]} failed: {error.stderr.strip()[:500]}") from None
    except subprocess.TimeoutExpired:
        raise CannotCompile(f"{command[0]} took more than {_TIMEOUT_S} s") from None
