"""Command line, sandbox and environment of an application's process.

With bubblewrap the process sees system libraries, Python and its package read-only, a bounded /tmp, its own processes,
and the network only if its package requests it. Without bubblewrap, `launch.py` limits its resources, but not its access
to files.

Source: bubblewrap, `bwrap(1)`.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from engines.application.settings import ApplicationSettings
from engines.base import EngineStartError

_SOURCE = Path(__file__).parents[2]
LAUNCH = Path(__file__).with_name("launch.py")
LIBRARY = _SOURCE / "vlm_app.py"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/ssl", "/etc/alternatives")
_NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf")
_NAMESPACES = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts")
_OWN = ("--proc", "/proc", "--dev", "/dev")
_PROBE_S = 10.0
MAX_FILES = 1024  #: open files of a process
MAX_FILE_BYTES = 4 * 1024**3
#: Capacity of /tmp and /dev/shm of an application without a memory limit.
DEFAULT_TMPFS_BYTES = 1024**3
#: Capacities of /tmp and /dev/shm as fractions of the memory limit.
_TMPFS_RATIOS = {"/tmp": 0.5, "/dev/shm": 0.25}


@cache
def find_bubblewrap() -> str | None:
    """The path of bubblewrap, if it is installed and can create namespaces."""
    program = shutil.which("bwrap")
    # In some containers, bubblewrap can create namespaces but not mount /proc.
    return program if program and _runs(program) else None


@cache
def _runs(program: str, *options: str) -> bool:
    """Whether bubblewrap runs here, and its version has the options."""
    view = ("--unshare-net", "--ro-bind", "/", "/", *_OWN)
    probe = [program, *_NAMESPACES, *view, *options, "--", "/bin/true"]
    try:
        done = subprocess.run(probe, capture_output=True, timeout=_PROBE_S, env={})
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def check_isolation(isolation: str) -> None:
    """Raises: EngineStartError if bubblewrap is required and does not run."""
    if isolation == "require" and find_bubblewrap() is None:
        raise EngineStartError(
            "VLM_NODE__ISOLATION=require: bubblewrap (bwrap) is not installed, or cannot make user "
            "namespaces here; install it, or set auto to run applications with limits alone"
        )


def find_sandbox(settings: ApplicationSettings) -> str | None:
    """The path of bubblewrap, if the application runs in it."""
    return None if settings.isolation == "none" else find_bubblewrap()


def make_command(settings: ApplicationSettings) -> list[str]:
    """The command line of the application's process. Raises: EngineStartError."""
    check_isolation(settings.isolation)
    package = Path(settings.model).resolve()
    bubblewrap = find_sandbox(settings)
    values = {"NOFILE": MAX_FILES, "FSIZE": MAX_FILE_BYTES, "DATA": settings.memory_bytes}
    # Without a user namespace, the limit would count all processes of the user.
    if bubblewrap is not None:
        values["NPROC"] = settings.max_processes
    limits = [f"{name}={value}" for name, value in values.items() if value]
    program = _program(settings, package)
    launch = [sys.executable, "-I", "-S", str(LAUNCH), *limits, "--", *program]
    if bubblewrap is None:
        return launch
    return [bubblewrap, *_sandbox(bubblewrap, settings, package), "--", *launch]


def _program(settings: ApplicationSettings, package: Path) -> list[str]:
    if settings.command:
        first, *arguments = settings.command
        return [str(package / first), *arguments]
    # `-S` excludes the worker's packages if the application has its own.
    own = [settings.packages] if settings.packages else []
    code = (
        "import sys; from importlib.util import module_from_spec, spec_from_file_location; "
        f"sys.path[:0] = {own or [str(_SOURCE)]!r}; "
        f"spec = spec_from_file_location('vlm_app', {str(LIBRARY)!r}); "
        "app = sys.modules['vlm_app'] = module_from_spec(spec); spec.loader.exec_module(app); "
        f"app.serve({settings.entry!r})"
    )
    # -B: bytecode would change the verified package. -I ignores PYTHONDONTWRITEBYTECODE.
    return [sys.executable, "-I", "-B", *(["-S"] if own else []), "-c", code]


def _sandbox(program: str, settings: ApplicationSettings, package: Path) -> Iterator[str]:
    yield from (*_NAMESPACES, "--unshare-cgroup-try", "--die-with-parent", "--new-session")
    yield from ("--cap-drop", "ALL", "--hostname", "application")
    if _runs(program, "--disable-userns"):  # a nested namespace could mount tmpfs without a limit
        yield "--disable-userns"
    if not settings.network:
        yield "--unshare-net"
    seen = [*_SYSTEM, *_SYSTEM_FILES, *(_NETWORK_FILES if settings.network else ())]
    yield from _OWN
    is_bounded = _runs(program, "--size", "4096", "--tmpfs", "/tmp")
    for path, ratio in _TMPFS_RATIOS.items():
        size = int(ratio * settings.memory_bytes) or DEFAULT_TMPFS_BYTES
        yield from ("--size", str(size)) if is_bounded else ()
        yield from ("--tmpfs", path)
    for path in _outermost(_python(settings)):
        yield from ("--ro-bind", path, path)
    for path in seen:
        yield from ("--ro-bind-try", path, path)
    devices = ("/sys", *sorted(str(path) for path in Path("/dev").glob("nvidia*")))
    for device in devices if settings.uses_gpu else ():
        yield from ("--dev-bind-try", device, device)
    yield from ("--ro-bind", str(package), str(package), "--chdir", str(package))
    # Both are tmpfs mounts without a size limit.
    yield from ("--remount-ro", "/dev", "--remount-ro", "/")


def tmpfs_bytes(pid: int) -> int:
    """Memory of the files in a sandbox's tmpfs mounts. `pid`: a process in the sandbox."""
    total = 0
    for path in _TMPFS_RATIOS:
        with suppress(OSError):
            inside = f"/proc/{pid}/root{path}"
            # Before bubblewrap changes the root, this is the node's own path.
            if os.stat(inside).st_dev not in (os.stat("/").st_dev, os.stat(path).st_dev):
                found = os.statvfs(inside)
                total += (found.f_blocks - found.f_bfree) * found.f_frsize
    return total


def _python(settings: ApplicationSettings) -> list[str]:
    own = [settings.packages] if settings.packages else []
    source = [] if own or settings.command else [_SOURCE / "engines", _SOURCE / "shared"]
    named = [sys.prefix, sys.base_prefix, *own, *source, LAUNCH, LIBRARY]
    real = [os.path.realpath(path) for path in (*named, sys.executable)]
    return [*map(str, named), *real[:-1], os.path.dirname(real[-1])]


def _outermost(paths: Sequence[str]) -> list[str]:
    """Drop paths inside other paths or /usr."""
    found: list[str] = []
    for path in sorted(set(paths)):
        if not any(Path(path).is_relative_to(other) for other in (*found, "/usr")):
            found.append(path)
    return found


def make_environment(
    settings: ApplicationSettings, scratch: Path, variables: Mapping[str, str]
) -> Mapping[str, str]:
    """The environment of the process: its deployed variables, without the worker's addresses and keys."""
    threads = str(settings.num_threads or 1)
    folder = "/tmp" if find_sandbox(settings) else str(scratch)
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "PYTHONDONTWRITEBYTECODE": "1",
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")
        if settings.uses_gpu
        else "",
        **variables,
    }
