"""Takes limits on itself, then becomes another program: `launch.py NAME=VALUE ... -- PROGRAM ARGUMENTS`.

A file for itself, as it runs before and without everything else.
"""

import ctypes
import os
import resource
import signal
import sys

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
        most = int(value)
        number = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(number)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (most, most))
    os.execv(arguments[place + 1], arguments[place + 1 :])


if __name__ == "__main__":
    main(sys.argv[1:])
