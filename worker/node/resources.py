"""GPUs and memory of a machine, and memory of its instances, from the kernel, because the supervisor loads no torch.

Source: proc(5), `RssAnon` and `RssShmem`; cgroups(7), `memory.max` and version 1's `memory.limit_in_bytes`.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from worker.node.supervisor import NodeError

_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
_RESIDENT = re.compile(rb"^Rss(Anon|Shmem):\s*(\d+) kB$", re.MULTILINE)
VARIABLE = "CUDA_VISIBLE_DEVICES"


def room_bytes(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory of the machine, or of its container if that has a lower limit."""
    found = [psutil.virtual_memory().total]
    for name in _LIMITS:
        with suppress(OSError, ValueError):  # missing, or `max`
            found.append(int((groups / name).read_text()))
    return min(found)


def used_bytes(pid: int) -> int:
    """Memory of a process and its descendants, without file pages. Shared memory counts once."""
    processes: list[psutil.Process] = []
    with suppress(psutil.Error):
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    own = shared = 0
    for process in processes:
        with suppress(OSError):
            status = Path(f"/proc/{process.pid}/status").read_bytes()  # may not be UTF-8
            found = {kind: int(size) * 1024 for kind, size in _RESIDENT.findall(status)}
            own += found.get(b"Anon", 0)
            shared = max(shared, found.get(b"Shmem", 0))
    return own + shared


def too_much(used: int, limit: int, *, is_ready: bool) -> str:
    """The error of an instance beyond its memory limit. It suggests more memory for an instance that still loads."""
    ask = math.ceil(max(1.5 * limit, (1.25 if is_ready else 3) * used) / 1e8) * 100
    return (
        f"the instance used {used / 1e6:.0f} MB of memory, its limit is {limit / 1e6:.0f} MB: deploy it with "
        f"--resources memory={ask}m, or omit memory= for no limit"
    )


def find_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """The GPUs that this process may use, by their CUDA names."""
    named = environment.get(VARIABLE)
    if named is None:
        found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
        return [str(number) for number in sorted(int(match[1]) for match in found if match)]
    names = [name.strip() for name in named.split(",")]
    end = next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))
    return names[:end]


def share_gpus(gpus: Sequence[str], num_workers: int, num_per_worker: int) -> list[dict[str, str]]:
    """Variables that assign GPUs to workers, round-robin if GPUs are too few; empty for one GPU. Raises: NodeError."""
    if len(gpus) < 2:
        return [{} for _ in range(num_workers)]
    if num_per_worker > len(gpus):
        raise NodeError(
            f"--tensor-parallel {num_per_worker} needs {num_per_worker} GPUs, and this machine has {len(gpus)}: give "
            f"at most {len(gpus)}",
            os.EX_CONFIG,
        )
    num_groups = len(gpus) // num_per_worker
    starts = [worker % num_groups * num_per_worker for worker in range(num_workers)]
    return [{VARIABLE: ",".join(gpus[start : start + num_per_worker])} for start in starts]
