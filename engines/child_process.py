"""Child processes without rights, for what strangers have made: pictures, chat templates.

A child has one socket to its parent, an empty environment, and limits that it takes on itself before it reads
anything. It may die of what it reads. Used by the worker's decoders and by chat templates; it must not know either.
"""

import resource
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_SOURCE = Path(__file__).parent.parent


def start_child(
    module: str, *arguments: int, buffer_bytes: int = 0
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Run `python -m module NUMBER arguments...`, NUMBER being its end of the socket. Raises: OSError.

    `buffer_bytes`: what either end may send ahead of its reader; 0: the system's default.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        if buffer_bytes:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        number = theirs.fileno()
        command = [sys.executable, "-m", module, str(number), *map(str, arguments)]
        try:
            process = subprocess.Popen(
                command, pass_fds=(number,), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, cwd="/", env={"PYTHONPATH": str(_SOURCE)},
                start_new_session=True,
            )  # fmt: skip
        except OSError:
            ours.close()
            raise
    return process, ours


def receive(sock: socket.socket, num_bytes: int, until: float | None = None) -> bytearray:
    """So many bytes, `until` a reading of `time.monotonic`. Raises: EOFError, TimeoutError, OSError."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        if until is not None:
            sock.settimeout(max(0.001, until - time.monotonic()))
        count = sock.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return data


def restrict(max_bytes: int) -> None:
    """Give up what no child needs: memory beyond `max_bytes`, writing files, core dumps."""
    for limit, most in (
        (resource.RLIMIT_AS, max_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(limit, (most, most))
