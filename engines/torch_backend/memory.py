"""Free memory of a device."""

from pathlib import Path

import psutil
import torch

_CGROUP = Path("/sys/fs/cgroup")
_limit = 0


def limit_memory(num_bytes: int) -> None:
    """Set the total memory that `free_bytes` assumes for this process on the CPU; 0: no limit."""
    global _limit
    _limit = num_bytes


def free_bytes(device: torch.device) -> int:
    """Free bytes of a device; on the CPU, within the container's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = min(psutil.virtual_memory().available, _available_in_container())
    if not _limit:
        return available
    held = psutil.Process().memory_info()
    return min(available, max(0, _limit - (held.rss - held.shared)))


def _available_in_container() -> int:
    """Free bytes in the control group (version 2); without a limit, more than any machine has."""
    try:
        limit, used = (int((_CGROUP / f"memory.{x}").read_text()) for x in ("max", "current"))
    except (OSError, ValueError):  # no control group, or no limit ("max")
        return 1 << 62
    return max(0, limit - used)
