"""The processes of the compared systems, one per system, which compute only on request.

All have the same number of threads. They load one after another.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.install import peer_python
from loadtest.fleet import ROOT


class Peer:
    """A system in a separate process. After it has loaded, it answers each line of JSON with a line of JSON."""

    def __init__(self, system: str, python: Path, options: dict[str, Any]) -> None:
        """Raises: ChildProcessError."""
        self._system = system
        command = [str(python), "-m", "benchmarks.peers.worker", system, json.dumps(options)]
        pipe, env = subprocess.PIPE, {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        self._read()

    def ask(self, task: str, **arguments: Any) -> Any:
        """The answer. Raises: ChildProcessError."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps([task, arguments]) + "\n")
        stdin.flush()
        return self._read()

    def _read(self) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise ChildProcessError(f"{self._system} ended: see its output above")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def run_peers(
    systems: Iterable[str], folder: Path, options: dict[str, Any]
) -> Iterator[dict[str, Peer]]:
    """Load systems; returns them by name. `folder`: their environments. Raises: OSError, errors of `peer_python`."""
    with ExitStack() as stack:
        peers: dict[str, Peer] = {}
        for system in systems:
            print(f"loading {system}", file=sys.stderr, flush=True)
            python = peer_python(folder, system.partition(":")[0])
            peers[system] = Peer(system, python, options)
            stack.callback(peers[system].close)
        yield peers
