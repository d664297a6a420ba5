"""Runs a server, and stops all of its processes when the worker ends: `guard.py PROGRAM ARGUMENTS`.

Standard input is a pipe from the worker, which also closes if the worker is killed. The whole process group is stopped,
because child processes of vLLM and SGLang outlive the server and keep the GPU's memory. Imports nothing of the package.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

STOP_S = 10.0  #: time between SIGTERM and SIGKILL if the worker stops
KILL_S = 2.0  #: the same if the worker was killed; short, because its successor needs the memory


def main(command: list[str]) -> int:
    """Returns the exit code of the server."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)

    def send(number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)

    def end_with_the_worker() -> None:
        while os.read(0, 1):
            pass
        send(signal.SIGTERM)
        time.sleep(KILL_S)
        send(signal.SIGKILL)

    signal.signal(signal.SIGTERM, lambda *_: send(signal.SIGTERM))
    signal.signal(signal.SIGINT, lambda *_: send(signal.SIGTERM))
    threading.Thread(target=end_with_the_worker, daemon=True).start()
    code = server.wait()
    send(signal.SIGKILL)  # kills child processes that outlived the server
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
