"""Process startup: huge pages, mapped files that stay untouched, and message types resolved before threads start."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import mmap, sys, threading
from shared.process import end_startup

def read(name):
    text = open("/proc/self/smaps_rollup").read()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(name)))

with open(sys.argv[1].encode("utf-8", "surrogateescape"), "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
objects = [[number] for number in range(200_000)]
threads = [threading.Thread(target=sys.stdin.read, daemon=True) for _ in range(8)]
for thread in threads:
    thread.start()
before = read("Rss")
end_startup()
for thread in threading.enumerate():
    if thread.name == "huge pages":
        thread.join()
assert objects == [[number] for number in range(200_000)]
print(read("AnonHugePages"), read("Rss") - before, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no /proc")
def test_loaded_memory_is_in_huge_pages_and_stacks_stay_small(tmp_path: Path):
    """Another mapped file has a name that is not valid UTF-8."""
    path = bytes(tmp_path) + b"/\xff"
    Path(os.fsdecode(path)).write_bytes(b"x" * 4096)
    with subprocess.Popen(
        [sys.executable, "-c", START, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        huge_kb, grown_kb = map(int, process.stdout.readline().split())
        _, errors = process.communicate()
    assert errors == ""
    assert grown_kb < 8 * 1024
    [release] = re.findall(r"^(\d+)\.(\d+)", Path("/proc/sys/kernel/osrelease").read_text())
    can_collapse = tuple(map(int, release)) >= (6, 1)
    if can_collapse and Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert huge_kb >= 4 * 1024


DECODE = """
import sys, threading, msgspec
from shared.process import resolve_structs

sys.setswitchinterval(1e-6)
outer = []
for number in range(1000):
    inner = msgspec.defstruct(f"Inner{number}", [(f"f{i}", "int | None", None) for i in range(5)])
    fields = [("a", inner | None, None)] + [(f"f{i}", "int | None", None) for i in range(5)]
    outer.append(msgspec.defstruct(f"Outer{number}", fields))
resolve_structs()
barrier = threading.Barrier(4)

def decode():
    for each in outer:
        barrier.wait()
        assert msgspec.json.decode(b'{"f1": 1, "a": {"f2": 2}}', type=each).a.f2 == 2

threads = [threading.Thread(target=decode) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_can_decode_a_type_concurrently():
    assert subprocess.run([sys.executable, "-c", DECODE]).returncode == 0
