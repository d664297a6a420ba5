"""Memory of a node and of its instances.

Source: proc(5), `RssAnon` and `RssShmem`; cgroups(7), `memory.max` and version 1's `memory.limit_in_bytes`.
"""

import math
import re
from contextlib import suppress
from pathlib import Path

import psutil

_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_RESIDENT = re.compile(rb"^Rss(Anon|Shmem):\s*(\d+) kB$", re.MULTILINE)


def room_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """What the machine has, or the container may use."""
    found = [psutil.virtual_memory().total]
    for name in _LIMITS:
        with suppress(OSError, ValueError):  # not there, or `max`
            found.append(int((groups / name).read_text()))
    return min(found)


def used_bytes(pid: int) -> int:
    """What a process and its descendants hold; without pages of files, which the kernel may drop.

    Memory that they share is counted once.
    """
    processes: list[psutil.Process] = []
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    own = shared = 0
    for process in processes:
        with suppress(OSError):
            status = Path(f"/proc/{process.pid}/status").read_bytes()  # a name may be any bytes
            found = {kind: int(size) * 1024 for kind, size in _RESIDENT.findall(status)}
            own += found.get(b"Anon", 0)
            shared = max(shared, found.get(b"Shmem", 0))
    return own + shared


def too_much(used: int, limit: int, *, is_ready: bool) -> str:
    """What to say of an instance that took more than its deployment states. One that still loads needs more yet."""
    ask = math.ceil(max(1.5 * limit, (1.25 if is_ready else 3) * used) / 1e8) * 100
    return (
        f"it used {used / 1e6:.0f} MB of memory, of {limit / 1e6:.0f} MB: deploy it with "
        f"--resources memory={ask}m, or without memory=, which sets no limit"
    )
