"""The processes of the systems under comparison, one a system, which compute only when they are asked.

Each has the same number of threads; loading is one after another.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peers.install import is_installed, peers_python
from benchmarks.peers.peer import Workload


class PeerFailure(Exception):
    """A system's process ended; what it said is above, on stderr."""


class PeerProcess:
    """A system in a process of its own: it answers every line of JSON by one, and says first that it is loaded."""

    def __init__(self, name: str, command: list[str]) -> None:
        """Raises: PeerFailure."""
        self._name = name
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._read()

    def ask(self, question: object) -> Any:
        """The answer. Raises: PeerFailure."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()
        return self._read()

    def _read(self) -> Any:
        stdout = self._process.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise PeerFailure(f"{self._name} ended")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Fleet(ExitStack):
    """Systems that are loaded. Use as a context manager: leaving it ends the processes."""

    def __init__(
        self,
        systems: Iterable[str],
        folder: Path,
        options: dict[str, Any],
        report: Callable[[str], None],
    ) -> None:
        """Load all, reporting each. Raises: PeerFailure, and what installing raises."""
        super().__init__()
        self._processes: dict[str, PeerProcess] = {}
        for system in systems:
            is_foreign = system.startswith("llama.cpp:")
            if is_foreign and not is_installed(folder):
                report("building llama.cpp, once: minutes")
            report(f"loading {system}")
            python = str(peers_python(folder)) if is_foreign else sys.executable
            command = [python, "-m", "benchmarks.peers.worker", system, json.dumps(options)]
            self._processes[system] = PeerProcess(system, command)
            self.callback(self._processes[system].close)

    def ask(self, system: str, workload: Workload) -> float:
        """Seconds. Raises: PeerFailure."""
        return self._processes[system].ask([workload.task, workload.arguments])
