"""The machine that a load runs on: in words, and how long it takes there to wake a process."""

import platform
import socket
import subprocess
import sys
import time
from statistics import median

import psutil

_NUM_TRIES = 500
_PAUSE_S = 0.0003  #: long enough for the other one, and its core, to go to sleep
_ECHO = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as wire:
    while data := wire.recv(1):
        wire.send(data)
"""


def machine() -> str:
    """The machine in words."""
    return f"{psutil.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def measure_round_trip_s() -> float:
    """A byte to a sleeping process and back, at the median: two of the wake-ups of which a request needs many."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", _ECHO, str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as echo:
        theirs.close()
        try:
            _ask(ours)  # it has started
            return median(_ask(ours) for _ in range(_NUM_TRIES))
        finally:
            ours.close()
            echo.wait()


def _ask(wire: socket.socket) -> float:
    resume_at = time.perf_counter() + _PAUSE_S
    while time.perf_counter() < resume_at:  # asleep, our own core would be slow too
        pass
    started_at = time.perf_counter()
    wire.send(b"x")
    if not wire.recv(1):
        raise ConnectionError("the other process ended")
    return time.perf_counter() - started_at
