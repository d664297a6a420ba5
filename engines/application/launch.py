"""Sets resource limits, then executes a program: `launch.py NAME=VALUE ... -- PROGRAM ARGUMENTS`.

It imports nothing of this package.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38


def main(arguments: list[str]) -> None:
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
    program = arguments[place + 1]
    try:
        os.execv(program, arguments[place + 1 :])
    except OSError as error:  # the error does not name the program
        sys.exit(f"{program}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
