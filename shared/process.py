"""Child processes that end with their parent, even if it is killed without a word."""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
POLL_S = 0.5

#: Looked up once in the parent: between fork and exec nothing may be imported or loaded.
_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have this process end with `number` when its parent ends.

    On Linux the kernel does it; elsewhere a thread watches the parent's id. Call it in the child.
    """
    parent = os.getppid()
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it ended between the two calls
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
