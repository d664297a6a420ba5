"""How much memory a node has, and what an instance holds of it."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from worker.node.resources import room_bytes, too_much, used_bytes

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


def test_what_a_process_and_its_children_hold_without_the_pages_of_files(tmp_path: Path):
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
def test_a_container_has_no_more_than_it_may_use(tmp_path: Path, name: str):
    total = psutil.virtual_memory().total
    assert room_bytes(tmp_path) == total
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for text, room in (("max\n", total), ("9223372036854771712\n", total), ("123456\n", 123_456)):
        (tmp_path / name).write_text(text)
        assert room_bytes(tmp_path) == room


@pytest.mark.parametrize(
    ("used", "limit", "is_ready", "ask"),
    [
        (310e6, 20e6, True, "400m"),
        (1.01e9, 1e9, True, "1500m"),
        (5e9, 2e9, True, "6300m"),
        (5e9, 2e9, False, "15000m"),
    ],
)
def test_it_is_told_what_to_deploy_with(used: float, limit: float, is_ready: bool, ask: str):
    said = too_much(int(used), int(limit), is_ready=is_ready)
    assert f"--resources memory={ask}," in said
    assert f"of {limit / 1e6:.0f} MB" in said
