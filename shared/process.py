"""A process of ours: it ends with its parent, even if that is killed without a word, and what it
loaded at its start is not collected again and again.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
POLL_S = 0.5
#: New objects between two collections: Python's 700 are a few requests' worth.
COLLECT_EVERY = 10_000

#: Looked up once in the parent: between fork and exec nothing may be imported or loaded.
_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


def end_startup() -> None:
    """Leave what was loaded so far out of collections, and collect less often from now on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_EVERY, 20, 20)


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
