"""A process of ours: it ends with its parent, even if that is killed without a word, and what it
loaded at its start is not collected again and again, and lies in huge pages.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
MADV_COLLAPSE = 25
HUGE_PAGE = 2 << 20
#: Of one mapping; what is larger is weights or a cache, not what Python has loaded.
MAX_COLLAPSED = 64 << 20
POLL_S = 0.5
#: New objects between two collections: Python's 700 are a few requests' worth.
COLLECT_EVERY = 10_000

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
#: Looked up once in the parent: between fork and exec nothing may be imported or loaded.
_prctl = _libc and _libc.prctl


def end_startup() -> None:
    """Leave what was loaded so far out of collections, and collect less often from now on.

    Objects move into huge pages soon after where Linux (6.1) can: a process that wakes for each
    request has few addresses to look up then.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, 20, 20)
    if _libc is not None:  # where memory is in pieces, the kernel may take a second
        threading.Thread(target=_collapse_heaps, name="huge pages", daemon=True).start()


def _collapse_heaps() -> None:
    assert _libc is not None
    with suppress(OSError):
        for start, size in _heaps():  # refused where the kernel cannot: it is only slower
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), MADV_COLLAPSE)


def _heaps() -> Iterator[tuple[int, int]]:
    """Address and length of the whole huge pages that fit into this process's own memory."""
    guarded_at = 0  # where the page below a thread's stack ends
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        addresses, rights, _, _, _, *name = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        if rights == "---p":
            guarded_at = end
        elif rights == "rw-p" and name in ([], ["[heap]"]) and start != guarded_at:
            start, end = -(-start // HUGE_PAGE) * HUGE_PAGE, end // HUGE_PAGE * HUGE_PAGE
            if 0 < end - start <= MAX_COLLAPSED:
                yield start, end - start


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have this process end with `number` when its parent, of that process id, ends.

    On Linux the kernel does it; elsewhere a thread watches the parent's id. Call it in the child.
    """
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it has ended already
            os.kill(os.getpid(), number)
    else:
        threading.Thread(target=_watch, args=(parent, number), daemon=True).start()


def request_parent_death_signal() -> None:
    """The part of `die_with_parent` that is safe between fork and exec (`preexec_fn`); Linux only."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _watch(parent: int, number: signal.Signals) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), number)
