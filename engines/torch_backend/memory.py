"""Free memory of a device."""

from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")
_STATUS = Path("/proc/self/status")
_limit = 0


def limit_memory(num_bytes: int) -> None:
    """Limit the total memory of this process that `free_bytes` assumes on the CPU; 0: no limit."""
    global _limit
    _limit = num_bytes


def free_bytes(device: torch.device) -> int:
    """Free bytes of a device; on the CPU, within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    on_host = psutil.virtual_memory().available
    return min(on_host, _available_in_container(), _available_within_limit())


def _available_in_container() -> int:
    """Free bytes in the control group (version 2); without a limit, more than any machine has."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except OSError:
        return 1 << 62
    return (1 << 62) if limit == "max" else max(0, int(limit) - used)


def _available_within_limit() -> int:
    if not _limit:
        return 1 << 62
    lines = _STATUS.read_text().splitlines()
    held = sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))
    return max(0, _limit - held * 1024)
