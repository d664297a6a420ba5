"""Runs a server, and ends all of its processes with the worker: `guard.py PROGRAM ARGUMENTS`.

The worker holds the other end of standard input, which closes however the worker ends. The processes of vLLM and SGLang outlive a
server that is killed, and hold the GPU's memory. It runs without the rest of the package.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

STOP_S = 10.0  #: between SIGTERM and SIGKILL, for a worker that stops
KILL_S = 2.0  #: after the worker was killed; short, because the next start needs the memory


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
    send(signal.SIGKILL)  # processes that outlived it
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
