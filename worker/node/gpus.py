"""Which GPUs each worker of a machine sees. Asks no driver: the supervisor loads no torch."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from worker.node.supervisor import NodeError

VARIABLE = "CUDA_VISIBLE_DEVICES"


def find_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Those that this process may use, by the names that CUDA takes."""
    named = environment.get(VARIABLE)
    if named is None:
        found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
        return [str(number) for number in sorted(int(match[1]) for match in found if match)]
    names = [name.strip() for name in named.split(",")]
    end = next((place for place, name in enumerate(names) if name in ("", "-1")), len(names))
    return names[:end]


def share_gpus(gpus: Sequence[str], num_workers: int, num_per_worker: int) -> list[dict[str, str]]:
    """The variables of each worker: so many GPUs of its own, or in turn where there are too few.

    Nothing is said where there is one GPU or none. Raises: NodeError if one worker wants more than all.
    """
    if len(gpus) < 2:
        return [{} for _ in range(num_workers)]
    if num_per_worker > len(gpus):
        raise NodeError(
            f"--tensor-parallel {num_per_worker} wants {num_per_worker} GPUs, and there are {len(gpus)}: give at "
            f"most {len(gpus)}",
            os.EX_CONFIG,
        )
    num_groups = len(gpus) // num_per_worker
    starts = [worker % num_groups * num_per_worker for worker in range(num_workers)]
    return [{VARIABLE: ",".join(gpus[start : start + num_per_worker])} for start in starts]
