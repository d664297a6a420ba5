"""How many threads an engine on a CPU computes with: what the machine has, the container may use,
and the model gains from.
"""

import logging
import os
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

#: So small a model gains nothing from a second thread, and loses where others compute: each waits
#: for the other.
ONE_THREAD_BYTES = 32 * 2**20
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


def set_num_threads(
    asked: int, device: torch.device, weight_bytes: int, num_members: int = 1
) -> None:
    """Let torch compute with as many as asked for.

    0 on a CPU, unless OMP_NUM_THREADS says it: one for a small model, else torch's choice, but no
    more than the container's share of the processors; of these, each of `num_members` processes has
    its part. Threads beyond the share are stopped in the middle of an operation, and all wait.
    """
    if asked == 0 and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        asked = _default(weight_bytes) // num_members or 1
    if asked > 0:
        torch.set_num_threads(asked)


def _default(weight_bytes: int) -> int:
    if weight_bytes < ONE_THREAD_BYTES:
        return 1
    present, share = torch.get_num_threads(), cpu_share()
    allowed = max(1, int(share))
    if allowed < present:
        logger.info("%d threads: this container may use %.3g processors", allowed, share)
    return min(present, allowed)


def cpu_share() -> float:
    """Processors that the control groups of this process (either version) may use; without a limit, infinite."""
    shares = [float("inf")]
    for line in _lines(_OWN_CGROUP):
        _, controllers, own = line.split(":", 2)
        is_unified = not controllers
        if not is_unified and "cpu" not in controllers.split(","):
            continue
        root = _CGROUP if is_unified else _CGROUP / "cpu"
        folder = root / own.strip("/")
        for each in (folder, *folder.parents):  # in a container its own group is the root
            if not each.is_relative_to(root):
                break
            shares.append(_share_of(each))
    return min(shares)


def _share_of(folder: Path) -> float:
    both = " ".join(_lines(folder / "cpu.max")).split() or [
        *_lines(folder / "cpu.cfs_quota_us"),
        *_lines(folder / "cpu.cfs_period_us"),
    ]
    if len(both) != 2 or both[0] in ("max", "-1"):
        return float("inf")
    quota, period = both
    return int(quota) / int(period)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
