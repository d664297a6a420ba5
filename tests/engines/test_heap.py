"""Freed memory of large buffers is used again."""

import json
import platform
import subprocess
import sys

import pytest

_ROUNDS = """
import json, threading
from resource import RUSAGE_SELF, getrusage
from engines.heap import keep_freed_memory, use_one_heap

def computes():
    for _ in range(8):
        before = getrusage(RUSAGE_SELF).ru_minflt
        buffers = [bytearray(b"1") * 2**20 * size for size in (70, 16, 40, 24)]
        del buffers
        faults.append(getrusage(RUSAGE_SELF).ru_minflt - before)

use_one_heap()
keep_freed_memory()
faults = []
started = getrusage(RUSAGE_SELF).ru_maxrss
thread = threading.Thread(target=computes)
thread.start()
thread.join()
print(json.dumps([faults, getrusage(RUSAGE_SELF).ru_maxrss - started]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="allocates in a way of its own")
def test_a_thread_reuses_the_memory_of_freed_large_buffers() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ROUNDS], capture_output=True, text=True, check=True
    )
    faults, peak_kb = json.loads(done.stdout)
    pages = 150 * 2**20 // 4096
    assert min(faults[1:]) < pages // 10
    assert peak_kb < 200 * 2**10, "no more than is held at once"
