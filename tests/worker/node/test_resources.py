"""Resources of workers: each has its own GPUs, and an instance has the memory that it requested."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shared.settings.tree import EngineValues, Settings
from worker.node.resources import find_gpus, room_bytes, used_bytes
from worker.node.serve import create_node
from worker.node.supervisor import NodeError


def make_settings(**engine: object) -> Settings:
    return Settings(_env_file=None, engine=EngineValues(**engine))  # type: ignore


@pytest.mark.parametrize(
    ("named", "expected"),
    [("0,1,2", ["0", "1", "2"]), ("3, GPU-8a2f", ["3", "GPU-8a2f"]), ("2,-1,3", ["2"]), ("", [])],
)
def test_gpus_are_read_from_cuda_visible_devices(named: str, expected: list[str]) -> None:
    assert find_gpus({"CUDA_VISIBLE_DEVICES": named}) == expected


def test_without_the_variable_all_gpus_of_the_machine_are_used(tmp_path: Path) -> None:
    for name in ("nvidia10", "nvidia0", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert find_gpus({}, tmp_path) == ["0", "2", "10"]
    assert find_gpus({}, tmp_path / "none") == []


ALL = "0,1,2,3,4,5,6,7"


@pytest.mark.parametrize(
    ("named", "engine", "expected"),
    [
        (ALL, {}, ["0", "1", "2", "3", "4", "5", "6", "7"]),
        (ALL, {"kind": "vllm"}, ["0", "1"]),
        (ALL, {"kind": "vllm", "tensor_parallel": "4"}, ["0,1,2,3", "4,5,6,7"]),
        ("0,1,2", {"kind": "vllm", "tensor_parallel": "2"}, ["0,1", "0,1"]),
        ("0,1", {}, ["0", "1", "0"]),
        ("3", {}, ["3", "3"]),
        ("4,5", {"device": "cpu"}, ["4,5", "4,5"]),
        ("4,5", {"device": "cuda:1"}, ["4,5", "4,5"]),
        ("4,5", {"kind": "mock"}, ["4,5", "4,5"]),
    ],
)
def test_workers_have_their_own_gpus_while_there_are_enough(
    monkeypatch: pytest.MonkeyPatch, named: str, engine: dict[str, str], expected: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    children = create_node(make_settings(**engine), len(expected)).children
    workers = [child.environment for child in children if child.name.startswith("worker")]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in workers] == expected


def test_more_ranks_than_gpus_are_refused_with_the_numbers(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(NodeError, match="needs 4 GPUs, and this machine has 2"):
        create_node(make_settings(kind="vllm", tensor_parallel="4"), 1)


HOLDER = """
import ctypes, mmap, subprocess, sys
ctypes.CDLL(None).prctl(15, b"\\xff")  # a name that is no text
held = bytearray(40_000_000)
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
sum(mapped[::4096])
child = subprocess.Popen([sys.executable, "-c", "held = bytearray(30_000_000); print(); input()"],
                         stdin=subprocess.PIPE)
input()
"""


def test_memory_of_a_process_tree_excludes_file_pages(tmp_path: Path):
    (tmp_path / "weights").write_bytes(b"x" * 60_000_000)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "weights")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    try:
        holder.stdout.readline()
        assert psutil.Process(holder.pid).memory_info().rss > 100_000_000
        assert 70_000_000 < used_bytes(holder.pid) < 120_000_000
    finally:
        holder.communicate(b"\n")
    assert used_bytes(holder.pid) == 0


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_memory_limit_of_a_container_is_read(tmp_path: Path, name: str):
    total = psutil.virtual_memory().total
    assert room_bytes(tmp_path) == total
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for text, room in (("max\n", total), ("9223372036854771712\n", total), ("123456\n", 123_456)):
        (tmp_path / name).write_text(text)
        assert room_bytes(tmp_path) == room
