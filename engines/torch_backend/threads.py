"""Chooses the number of CPU threads for the machine, the container's limit, and the model."""

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from engines.core.budget import Trial
from engines.core.runner import ModelRunner
from engines.torch_backend.ops.cpu_level import read_cpuinfo
from engines.torch_backend.ops.native.library import Library

#: Seconds of a step of one token and of a prompt, by number of threads.
StepTimes = Mapping[int, tuple[float, float]]

logger = logging.getLogger(__name__)

#: Smaller models do not gain from a second thread, and lose on busy machines, where threads wait for each other.
ONE_THREAD_BYTES = 32 * 2**20
_PROMPT_TOKENS = 16  #: length of the timed prompt, enough for tiled kernels
_ROUNDS = 2
_MARGIN = 1.1  #: a smaller difference is noise
_HOPELESS = 1.3  #: if decoding is slower by this factor, smaller numbers of threads are not tried
_MAX_AGE_S = 86_400.0  #: maximum age of a stored measurement
_BUSY = 0.05  #: the machine is busy if threads wait for a processor for a larger share of the time
CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
OWN_THREADS = Path("/proc/self/task")


def set_num_threads(asked: int, device: torch.device, weight_bytes: int) -> None:
    """Set torch's number of threads.

    If `asked` is 0 on a CPU and OMP_NUM_THREADS is not set: one thread for a small model, else torch's default, limited
    to the processors that the container can use. More threads would be descheduled in the middle of an operation.
    """
    if asked == 0 and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        present, share = torch.get_num_threads(), cpu_share()
        asked = max(1, int(min(share, present)))
        if weight_bytes < ONE_THREAD_BYTES:
            asked = 1
        elif asked < present:
            logger.info("%d threads: this container can use %.3g processors", asked, share)
    if asked > 0:
        torch.set_num_threads(asked)


def settle_num_threads(runner: ModelRunner, shape: str, library: Library | None) -> None:
    """Use fewer threads than `set_num_threads` chose if steps are faster with them.

    Hyperthreads, or cores of another socket, can slow a step down. The times of each `shape` of model are stored next
    to the `library` for a day; without a library, steps are timed at each start. Times of a busy machine are not used.
    """
    most = torch.get_num_threads()
    if most == 1 or "OMP_NUM_THREADS" in os.environ:
        return
    times = _recall(runner, most, shape, library) if library else _time_steps(runner, most)
    if times is None:
        logger.info("%d threads: the machine is too busy to compare with fewer", most)
        return
    chosen = decide(times)
    torch.set_num_threads(chosen)
    logger.info(
        "%d threads: milliseconds for one token and for a prompt of %d tokens, by number of threads: %s",
        chosen,
        _PROMPT_TOKENS,
        "; ".join(f"{n}: {1e3 * a:.1f}, {1e3 * b:.1f}" for n, (a, b) in sorted(times.items())),
    )


def decide(times: StepTimes) -> int:
    """The largest number of threads, unless fewer are clearly faster by the geometric mean of both times."""
    most = max(times)

    def cost(count: int) -> float:
        return (times[count][0] * times[count][1]) ** 0.5

    best = min(times, key=cost)
    return best if _MARGIN * cost(best) < cost(most) else most


def _recall(runner: ModelRunner, most: int, shape: str, library: Library) -> StepTimes | None:
    """The last day's measurement with this library, torch and processor, or a new one.

    One process of a machine measures at a time, because workers that start together would slow each other down.
    """
    used = f"{library.file.name} {torch.__version__} {read_cpuinfo('model name')}"
    key = f"{used} {most} threads {shape}"
    file = library.file.with_name(f"times-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json")
    with ExitStack() as stack:
        with suppress(OSError):
            lock = stack.enter_context(open(file.with_name("times.lock"), "w", encoding="utf-8"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        found = _read_fresh(file)
        if found is not None:
            return found
        found = _time_steps(runner, most)
        if found is None:
            return None
        scratch = file.with_suffix(f".{os.getpid()}")
        with suppress(OSError):  # a measurement that cannot be stored is still used
            scratch.write_text(json.dumps(found), encoding="utf-8")
            scratch.replace(file)
    return found


def _read_fresh(file: Path) -> StepTimes | None:
    """A stored measurement; None if there is none, or it is damaged or too old."""
    try:
        age_s = time.time() - file.stat().st_mtime  # noqa: TID251 - the age of a file
        stored = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return {int(n): (a, b) for n, (a, b) in stored.items()} if age_s < _MAX_AGE_S else None


def _time_steps(runner: ModelRunner, most: int) -> StepTimes | None:
    """Times for `most` threads, half as many, and so on: the shorter of two tries. None if the machine is busy."""
    trial, times = Trial(runner), dict[int, tuple[float, float]]()
    began, waited_s = time.monotonic(), _waited_s()
    chunk = min(_PROMPT_TOKENS, trial.longest_chunk)
    try:
        for _ in range(_ROUNDS):
            count = most
            while count:
                torch.set_num_threads(count)
                one = trial.seconds(1, tries=1)
                if one > _HOPELESS * times.get(most, (one,))[0]:
                    break
                found = one, trial.seconds(0, chunk, tries=1)
                before = times.get(count, found)
                times[count] = min(one, before[0]), min(found[1], before[1])
                count //= 2
    finally:
        torch.set_num_threads(most)
    is_busy = _waited_s() - waited_s > _BUSY * most * (time.monotonic() - began)
    return None if is_busy else times


def _waited_s() -> float:
    """Time that threads of this process were ready and waited for a processor."""
    lines = (line for file in OWN_THREADS.glob("*/schedstat") for line in _lines(file))
    return sum(int(line.split()[1]) for line in lines) / 1e9


def cpu_share() -> float:
    """Processors that the control groups (version 1 or 2) of this process can use; infinite without a limit."""
    shares = [float("inf")]
    for line in _lines(OWN_CGROUP):
        _, controllers, own = line.split(":", 2)
        is_unified = not controllers
        if not is_unified and "cpu" not in controllers.split(","):
            continue
        root = CGROUP if is_unified else CGROUP / "cpu"
        folder = root / own.strip("/")
        for each in (folder, *folder.parents):  # a container sees its own group as the root
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
