"""The processes of the systems under comparison, one a system, which compute only when they are asked.

Used by `run`. Each has the same number of threads; loading is one after another.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.install import is_installed, peers_python
from benchmarks.peers.peer import SystemName, Workload


class PeerFailure(Exception):
    """A system's process ended; what it said is above, on stderr."""


class Fleet:
    """Systems that are loaded. Use as a context manager: leaving it ends the processes."""

    def __init__(
        self,
        systems: Iterable[SystemName],
        folder: Path,
        options: dict[str, Any],
        report: Callable[[str], None],
    ) -> None:
        """Load all, reporting each. Raises: PeerFailure, and what installing raises."""
        self._processes: dict[SystemName, subprocess.Popen[str]] = {}
        for system in systems:
            is_foreign = system.maker == "llama.cpp"
            if is_foreign and not is_installed(folder):
                report("building llama.cpp, once: minutes")
            report(f"loading {system}")
            python = str(peers_python(folder)) if is_foreign else sys.executable
            command = [python, "-m", "benchmarks.peers.worker", str(system), json.dumps(options)]
            self._processes[system] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._read(system)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()

    def ask(self, system: SystemName, workload: Workload) -> float:
        """Seconds. Raises: PeerFailure."""
        stdin = self._processes[system].stdin
        assert stdin is not None
        stdin.write(json.dumps([workload.task, workload.arguments]) + "\n")
        stdin.flush()
        return self._read(system)

    def _read(self, system: SystemName) -> Any:
        stdout = self._processes[system].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise PeerFailure(f"{system} ended")
        return json.loads(line)
