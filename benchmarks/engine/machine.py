"""The limits of a machine: bytes read and operations per second. Measured, not looked up."""

import platform
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_READ_BYTES = {"cpu": 256 * 1024**2, "cuda": 4 * 1024**3}  # larger than all caches
_MATRIX_SIDE = {"cpu": 1024, "cuda": 8192}
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """The highest rates of several tries."""

    device: str
    num_threads: int
    bytes_per_s: float
    flops_per_s: float  #: in the engine's precision


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    return Machine(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        num_threads=torch.get_num_threads(),
        bytes_per_s=_measure_bandwidth(device),
        flops_per_s=_measure_arithmetic(device, dtype),
    )


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process: on a GPU, of the device; on a CPU, resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _measure_bandwidth(device: torch.device) -> float:
    """Bytes read per second. A CPU sums integers, because a product of floats reads only half as fast."""
    if device.type == "cpu":
        numbers = torch.ones(_READ_BYTES["cpu"] // 8, dtype=torch.int64)
        return numbers.nbytes / _best_s(numbers.sum, device)
    rows = torch.ones(_READ_BYTES[device.type] // (4 * 4096), 4096, device=device)
    vector = torch.ones(4096, device=device)
    return rows.nbytes / _best_s(lambda: torch.mv(rows, vector), device)


def _measure_arithmetic(device: torch.device, dtype: torch.dtype) -> float:
    side = _MATRIX_SIDE[device.type]
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(side, side, generator=generator, device=device).to(dtype)
    return 2 * side**3 / _best_s(lambda: matrix @ matrix, device)


def _best_s(compute: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(_TRIES + 1):  # the first run is a warm-up
        started = time.perf_counter()
        compute()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def cpu_name() -> str:
    """The CPU's name in Linux."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
