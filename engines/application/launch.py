"""Takes limits on itself, then becomes another program: `launch.py NAME=VALUE ... -- PROGRAM ARGUMENTS`.

A file for itself, as it runs before and without everything else. NPROC counts beyond what the user already runs.
"""

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


def main(arguments: list[str]) -> None:
    """Never returns."""
    place = arguments.index("--")
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for limit in arguments[:place]:
        name, _, value = limit.partition("=")
        most = int(value) + (_num_threads() if name == "NPROC" else 0)
        number = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(number)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (most, most))
    os.execv(arguments[place + 1], arguments[place + 1 :])


def _num_threads() -> int:
    """Of this user, as far as they can be seen."""
    count = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except OSError:  # it has ended
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        if int(fields["Uid"].split()[0]) == os.getuid():
            count += int(fields["Threads"])
    return count


if __name__ == "__main__":
    main(sys.argv[1:])
