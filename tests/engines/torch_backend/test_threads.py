import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.torch_backend import threads
from engines.torch_backend.threads import (
    ONE_THREAD_BYTES,
    cpu_share,
    decide,
    set_num_threads,
    settle_num_threads,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def in_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Simulates that this process is in control groups with these files."""
    monkeypatch.setattr(threads, "CGROUP", tmp_path)
    monkeypatch.setattr(threads, "OWN_CGROUP", tmp_path / "own")

    def enter(own: str, **files: str) -> None:
        for name, text in {"own": own, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return enter


def test_the_smallest_cpu_limit_of_the_group_and_its_parents_counts(in_group):
    in_group("0::/\n", **{"cpu.max": "max 100000"})
    assert cpu_share() == float("inf")
    in_group("0::/gone\n")
    assert cpu_share() == float("inf")
    in_group("0::/a/b\n", **{"a/cpu.max": "250000 100000", "a/b/cpu.max": "400000 100000"})
    assert cpu_share() == 2.5
    # cgroup version 1
    quota = {"cpu/x/cpu.cfs_quota_us": "30000", "cpu/x/cpu.cfs_period_us": "10000"}
    in_group("4:memory:/x\n1:cpu,cpuacct:/x\n", **quota)
    assert cpu_share() == 3.0
    in_group("1:cpu,cpuacct:/x\n", **quota | {"cpu/x/cpu.cfs_quota_us": "-1"})
    assert cpu_share() == float("inf")


@pytest.mark.parametrize(
    ("cpu_max", "asked", "weight_bytes", "num_threads"),
    [
        ("max 100000", 0, ONE_THREAD_BYTES, 8),  # the default of torch
        ("350000 100000", 0, ONE_THREAD_BYTES, 3),  # the limit of the container
        ("50000 100000", 0, ONE_THREAD_BYTES, 1),  # less than one core
        ("max 100000", 0, ONE_THREAD_BYTES - 1, 1),  # a small model
        ("100000 100000", 5, 0, 5),  # the setting takes precedence
    ],
)
def test_threads_follow_container_model_and_settings(
    in_group, monkeypatch, cpu_max: str, asked: int, weight_bytes: int, num_threads: int
):
    in_group("0::/\n", **{"cpu.max": cpu_max})
    set_num_threads(asked, CPU, weight_bytes)
    assert torch.get_num_threads() == num_threads
    # the environment takes precedence over the default and the measurement
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    torch.set_num_threads(8)
    set_num_threads(0, CPU, weight_bytes)
    steps: Any = Steps({})
    settle_num_threads(steps, "shape", None)
    assert torch.get_num_threads() == 8


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ({8: (1.0, 1.0), 4: (0.95, 1.0), 2: (0.97, 1.9)}, 8),  # no difference beyond the noise
        ({8: (1.0, 1.0), 4: (0.6, 1.1), 2: (0.7, 2.0)}, 4),  # two threads share a core
        ({8: (1.0, 1.0), 4: (0.8, 0.8), 2: (0.4, 0.5), 1: (0.3, 0.6)}, 1),
    ],
)
def test_fewer_threads_are_used_if_clearly_faster(
    times: dict[int, tuple[float, float]], chosen: int
):
    assert decide(times) == chosen


class Steps:
    """A runner that defines only step times by number of threads: (a token, a prompt)."""

    longest_chunk = 100

    def __init__(self, times: dict[int, tuple[float, float]]) -> None:
        self.times = times
        self.tried: list[int] = []

    def seconds(self, num_streams: int, num_chunk_tokens: int = 0, tries: int = 0) -> float:
        count = torch.get_num_threads()
        self.tried.append(count)
        return self.times[count][num_chunk_tokens > 0]

    def settle(self, file: Path, chosen: int = 4) -> bool:
        """Returns whether any number of threads was measured."""
        torch.set_num_threads(8)
        before = len(self.tried)
        runner: Any = self
        library: Any = SimpleNamespace(file=file)
        settle_num_threads(runner, "shape", library)
        assert torch.get_num_threads() == chosen
        return len(self.tried) > before


def test_threads_are_measured_once_per_model_and_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    steps = Steps({8: (1.0, 1.0), 4: (0.5, 0.6), 2: (1.5, 2.0)})
    monkeypatch.setattr(threads, "Trial", lambda runner: runner)
    kernels, waits = tmp_path / "kernels.so", iter([0, 10**12])
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "schedstat").write_text("5 0 2")  # an idle machine
    monkeypatch.setattr(threads, "OWN_THREADS", tmp_path)
    with monkeypatch.context() as busy:
        busy.setattr(threads, "_lines", lambda file: [f"5 {next(waits, 10**12)} 2"])
        assert steps.settle(kernels, 8)
    assert steps.settle(kernels)
    assert set(steps.tried) == {8, 4, 2}  # one thread would be slower still
    assert not steps.settle(kernels)

    [file] = tmp_path.glob("times-*.json")
    for damaged in ("", file.read_text()[:9]):
        file.write_text(damaged)
        assert steps.settle(kernels), damaged

    two_days_ago = file.stat().st_mtime - 2 * 86_400
    os.utime(file, (two_days_ago, two_days_ago))
    assert steps.settle(kernels)
    for _ in range(2):  # used although it cannot be stored
        assert steps.settle(tmp_path / "gone" / "kernels.so")


def test_only_one_process_of_a_machine_measures_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    library: Any = type("Library", (), {"file": tmp_path / "kernels.so"})()
    inside, most = 0, 0
    lock = threading.Lock()

    def measure(_runner: Any, num_threads: int) -> dict[int, tuple[float, float]]:
        nonlocal inside, most
        with lock:
            inside, most = inside + 1, max(most, inside + 1)
        time.sleep(0.05)
        with lock:
            inside -= 1
        return {num_threads: (1.0, 1.0)}

    monkeypatch.setattr(threads, "_time_steps", measure)
    runner: Any = None
    # each thread opens the lock file itself, as a process does
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(settle_num_threads, runner, shape, library) for shape in "abab"]:
            done.result()
    assert most == 1
    assert len(list(tmp_path.glob("times-*.json"))) == 2
