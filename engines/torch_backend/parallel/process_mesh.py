"""Members that are processes of one machine: gloo on CPUs, over loopback alone, and NCCL between GPUs."""

import os
import sys
from datetime import timedelta  # noqa: TID251 - a duration, as torch wants it
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

#: What a member may wait for another that lives: one loads weights while the others have theirs. A step that hangs is the
#: watchdog's to end.
_LONGEST_WAIT = timedelta(hours=1)
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class ProcessMesh:
    """One process's view. Collectives are called by one thread, by all members in the same order."""

    def __init__(self, rank: int, size: int, device: torch.device, meeting_place: Path) -> None:
        """Wait for all members. `meeting_place` is a file that none has made yet, in a folder of this user alone."""
        self.rank = rank
        self.size = size
        os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK  # nobody else may connect
        is_cuda = device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            store=dist.FileStore(str(meeting_place), size),  # pyright: ignore[reportPrivateImportUsage]
            rank=rank,
            world_size=size,
            timeout=_LONGEST_WAIT,
            device_id=device if is_cuda else None,
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all members' tensors. Shapes: any, kept.

        On a CPU in the order of ranks, whatever the shape, so that a token's sum is the same in every batch.
        """
        if x.device.type == "cuda":
            y = x.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(y)
            return y
        first, *others = self._gather(x)
        total = first.float()
        for part in others:
            total += part
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """All members' tensors side by side in the last dimension, by rank. Shapes: (..., n); returns (..., size * n)."""
        return torch.cat(self._gather(x), dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's tensor, in memory of the others' that has its shape. Shapes: any, kept."""
        x = x.contiguous()
        dist.broadcast(x, 0)
        return x

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _gather(self, x: Tensor) -> list[Tensor]:
        parts = [
            torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)
        ]
        dist.all_gather(parts, x.contiguous())
        return parts
